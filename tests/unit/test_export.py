"""The forms in which a model is written: what they take and answer, and what happens to a wrong one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from stoker.config.loading import load
from stoker.config.schema import ONNX, refuse_missing, requirement_lines
from stoker.errors import UsageError
from stoker.image_classification import normalize
from stoker.recipe import Recipe
from stoker.train.export import FILES, Example, keep_example, wanted, write_forms
from stoker.train.state import Worker
from stoker_launcher.job import open_job

pytestmark = pytest.mark.long

ALL = list(FILES)
IMAGES = Example({"image": torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)})


class Photos(Recipe):
    def model(self) -> nn.Module:
        convolution = nn.Conv2d(3, 4, 3)
        return nn.Sequential(
            convolution, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 7)
        )

    def on_device(self, split: str) -> nn.Module:
        return normalize("RGB")


class TwoHeads(Recipe):
    def model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def on_device(self, split: str) -> Any:
        return lambda batch: {**batch, "rooms": batch["rooms"] / 2}

    def training_step(self, model: nn.Module, batch: dict[str, Any]) -> Any:
        raise NotImplementedError

    def export_inputs(self) -> list[str]:
        return ["size", "rooms"]

    def predict(self, model: nn.Module, batch: dict[str, Any]) -> Any:
        answer = model(torch.stack([batch["size"], batch["rooms"]], dim=1))
        return {"price": answer[:, 0], "rent": answer[:, 1]}


class CountsRecords(Photos):
    """Answers something else to a batch of one: no trace with two records can know."""

    def predict(self, model: nn.Module, batch: dict[str, Any]) -> Any:
        answer = model(batch["image"])
        return -answer if len(answer) == 1 else answer


class TextIn(TwoHeads):
    def training_step(self, model: nn.Module, batch: dict[str, Any]) -> Any:
        return model(batch["words"]).mean()

    def export_inputs(self) -> list[str]:
        return Recipe.export_inputs(self)


def trained(recipe: Recipe, folder: Path) -> nn.Module:
    model = recipe.model()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(0.1, 1)
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "model.json").write_text('{"recipe": "here:Recipe"}')
    return model.eval()


def export(
    recipe: Recipe, forms: list[str], example: Example | None, folder: Path
) -> dict[str, dict[str, Any]]:
    results: list[dict[str, Any]] = []
    write_forms(recipe, forms, example, folder, results.append)
    assert json.loads((folder / "model.json").read_text())["exports"] == results
    return {result["format"]: result for result in results}


def test_all_four_forms_answer_like_the_model_to_batches_that_were_not_traced(
    tmp_path: Path,
) -> None:
    recipe = Photos()
    model = trained(recipe, tmp_path)
    results = export(recipe, ALL, IMAGES, tmp_path)
    scale = model(recipe.on_device("val")(IMAGES.batch)["image"]).abs().max().item()
    for form in ALL:
        assert results[form]["error"] is None
        assert results[form]["batch_sizes"] == [1, 5]
        assert results[form]["max_abs_diff"] <= 1e-4 * scale
    about = json.loads((tmp_path / "model.json").read_text())
    assert about["recipe"] == "here:Recipe"
    assert about["inputs"] == [{"name": "image", "dtype": "uint8", "shape": ["batch", 3, 16, 16]}]
    assert about["outputs"] == [{"name": "output", "dtype": "float32", "shape": ["batch", 7]}]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*FILES.values(), "model.json"])

    # By whoever has the file and not the recipe: raw pixels in, any number of them.
    import onnxruntime

    pixels = torch.randint(0, 256, (9, 3, 16, 16), dtype=torch.uint8)
    expected = model(recipe.on_device("val")({"image": pixels})["image"])
    torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(pixels), expected)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (answer,) = session.run(["output"], {"image": pixels.numpy()})
    torch.testing.assert_close(torch.from_numpy(answer), expected, rtol=1e-4, atol=1e-4 * scale)


def test_a_recipe_of_ones_own_names_its_inputs_and_outputs(tmp_path: Path) -> None:
    recipe = TwoHeads()
    trained(recipe, tmp_path)
    example = Example({"size": torch.rand(4), "rooms": torch.rand(4)})
    results = export(recipe, ALL, example, tmp_path)
    assert [results[form]["error"] for form in ALL] == [None] * 4
    about = json.loads((tmp_path / "model.json").read_text())
    assert [spec["name"] for spec in about["inputs"]] == ["size", "rooms"]
    assert [spec["name"] for spec in about["outputs"]] == ["price", "rent"]


def test_a_file_that_answers_otherwise_is_not_left_and_the_others_are(tmp_path: Path) -> None:
    recipe = CountsRecords()
    trained(recipe, tmp_path)
    results = export(recipe, ["safetensors", "torchscript"], IMAGES, tmp_path)
    assert results["safetensors"]["error"] is None
    text = results["torchscript"]["error"]
    assert text.startswith("model.ts: output of a batch of 1 differs from the model's by ")
    assert "\n" not in text
    assert not (tmp_path / "model.ts").exists()
    assert (tmp_path / "model.safetensors").is_file()


def test_without_a_way_to_predict_the_default_form_still_checks_the_weights(tmp_path: Path) -> None:
    recipe = TextIn()
    trained(recipe, tmp_path)
    results = export(recipe, ["safetensors"], Example({}), tmp_path)
    assert results["safetensors"]["error"] is None
    assert "weights compared" in results["safetensors"]["note"]
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    results = export(recipe, ["safetensors"], Example({}), tmp_path)
    assert "bias" in results["safetensors"]["error"], "weights that do not fit the model are found"


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (
            TextIn(),
            "export: TextIn has no tensor column image in its batches (there are: words); define",
        ),
        (TwoHeads(), "export: TwoHeads has no tensor column size, rooms in its batches"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_the_first_batch(recipe: Recipe, said: str) -> None:
    config = load(None, ["export=[onnx]"]).config
    worker = Worker(config, recipe, None, 0, 0, 1, "cpu")
    with pytest.raises(UsageError) as refused:
        keep_example(worker, "train", {"words": torch.rand(3, 2), "text": ["a", "b", "c"]})
    assert str(refused.value).startswith(said)


def test_a_trial_with_the_first_batch_leaves_the_random_state_alone() -> None:
    config = load(None, ["export=[torch_export]"]).config
    worker = Worker(config, Photos(), None, 0, 0, 1, "cpu")
    before = torch.get_rng_state()
    keep_example(worker, "train", IMAGES.batch)
    assert torch.equal(before, torch.get_rng_state())
    worker.example = None

    class Broken(Photos):
        def predict(self, model: nn.Module, batch: dict[str, Any]) -> Any:
            return model(batch["image"], batch["label"])

    worker.recipe = Broken()
    with pytest.raises(
        UsageError, match=r"on_device\('val'\) and predict\(model, batch\) do not work on"
    ):
        keep_example(worker, "train", IMAGES.batch)


def test_a_missing_extra_is_named_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(None, ["export=[onnx]", "tracking.mlflow.uri=http://127.0.0.1:1"]).config
    refuse_missing(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError) as refused:
        refuse_missing(config)
    onnx, mlflow = refused.value.problems
    assert onnx.startswith(
        "export: onnx needs packages that are not installed here: pip install 'onnx>="
    )
    assert mlflow.endswith("pip install 'mlflow-skinny>=3'")
    assert len(requirement_lines(config)) == 4
    assert requirement_lines(load(None).config) == []


def test_hosts_install_what_the_job_needs_besides(tmp_path: Path) -> None:
    open_job(load(None, ["export=[onnx]"])).stage(tmp_path / "with")
    open_job(load(None)).stage(tmp_path / "without")
    lines = (tmp_path / "with/requirements.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("onnx")] == list(ONNX.values())
    assert "onnx" not in (tmp_path / "without/requirements.txt").read_text()


def test_a_registered_model_is_exported_whatever_is_asked_for() -> None:
    overrides = [
        "tracking.mlflow.uri=http://127.0.0.1:1",
        "tracking.mlflow.registered_model=digits",
    ]
    assert wanted(load(None, overrides).config) == ["safetensors", "torch_export"]
    assert wanted(load(None, ["export=[onnx]"]).config) == ["safetensors", "onnx"]
