"""Changing single values of a configuration: nothing else in the file moves."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.yaml_edit import with_values
from stoker.errors import UsageError

CHOICE = {
    "sagemaker.gpu.type": "ml.g5.xlarge",
    "sagemaker.cpu.type": "ml.c5.xlarge",
    "sagemaker.cpu.count": 2,
}


def test_values_change_where_they_stand_and_comments_stay() -> None:
    before = """\
# A job.
name: x   # its name
sagemaker:
  gpu: {type: ml.g4dn.xlarge}   # trains
  cpu:   # preprocesses
    type: "ml.c5.4xlarge"     # too large?
    count: 7
  spot: true

train:
    lr: 1e-3   # four spaces
"""
    after = with_values(before, CHOICE)
    assert after == before.replace("ml.g4dn.xlarge", "ml.g5.xlarge").replace(
        '"ml.c5.4xlarge"', "ml.c5.xlarge"
    ).replace("count: 7", "count: 2")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("name: x\n", "name: x\nsagemaker:\n  cpu: {count: 2}\n"),
        ("name: x", "name: x\nsagemaker:\n  cpu: {count: 2}\n"),
        ("", "sagemaker:\n  cpu: {count: 2}\n"),
        ("sagemaker:\n# later\nname: x\n", "sagemaker: {cpu: {count: 2}}\n# later\nname: x\n"),
        ("sagemaker: null\n", "sagemaker: {cpu: {count: 2}}\n"),
        ("sagemaker: {}\n", "sagemaker: {cpu: {count: 2}}\n"),
        ("sagemaker: {spot: true}  # cheap\n", "sagemaker: {spot: true, cpu: {count: 2}}  # cheap\n"),
        (
            "sagemaker:\n  cpu:\n    type: a  # why\n\n  # about spot\n  spot: true\n",
            "sagemaker:\n  cpu:\n    type: a  # why\n    count: 2\n\n  # about spot\n  spot: true\n",
        ),
        (
            "sagemaker:\n  tags:\n    - a\n    - b\n# end\n",
            "sagemaker:\n  tags:\n    - a\n    - b\n  cpu: {count: 2}\n# end\n",
        ),
        ("sagemaker:\n  cpu:\n  spot: true\n", "sagemaker:\n  cpu: {count: 2}\n  spot: true\n"),
        ("sagemaker:\n  spot:\n", "sagemaker:\n  spot:\n  cpu: {count: 2}\n"),
    ],
)
def test_a_key_that_is_absent_is_added_where_it_belongs(before: str, after: str) -> None:
    assert with_values(before, {"sagemaker.cpu.count": 2}) == after


def test_null_takes_a_value_out_of_use() -> None:
    assert with_values("a: {b: c}\n", {"a.b": None}) == "a: {b: null}\n"


@pytest.mark.parametrize(
    "text", ["a: &x {b: 1}\nsagemaker: *x\n", "sagemaker: 3\n", "sagemaker: {cpu: [1]}\n"]
)
def test_a_form_that_cannot_be_changed_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        with_values(text, {"sagemaker.cpu.count": 2})


leaves = st.one_of(
    st.integers(0, 9), st.booleans(), st.none(), st.sampled_from(["x", "a: b", "#c", "yes", ""])
)
sections = st.dictionaries(st.sampled_from(["type", "count", "k"]), leaves, max_size=3)
documents = st.fixed_dictionaries(
    {"name": leaves},
    optional={
        "sagemaker": st.dictionaries(
            st.sampled_from(["gpu", "cpu", "tags"]),
            st.one_of(sections, st.lists(leaves, max_size=2)),
            max_size=3,
        ),
        "train": sections,
    },
)


@settings(deadline=None, derandomize=True)
@given(documents, st.sampled_from([None, True, False]))
@pytest.mark.long
def test_whatever_the_document_only_the_asked_change_is_made(
    document: dict[str, object], flow: bool | None
) -> None:
    before = yaml.safe_dump(document, default_flow_style=flow, sort_keys=False)
    try:
        after = yaml.safe_load(with_values(before, CHOICE))
    except UsageError:
        listed = document.get("sagemaker") or {}
        assert any(isinstance(listed.get(key), list) for key in ("gpu", "cpu"))  # type: ignore[attr-defined]
        return
    cloud = after.pop("sagemaker")
    old = document.pop("sagemaker", None) or {}
    assert after == document
    assert cloud["gpu"]["type"] == "ml.g5.xlarge" and cloud["cpu"] == {
        **(old.get("cpu") or {}),  # type: ignore[attr-defined]
        "type": "ml.c5.xlarge",
        "count": 2,
    }
