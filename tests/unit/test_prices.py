"""Prices: which list is in use, where it comes from, and what a run is said to have cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from launcher import pricing
from launcher.job import open_job
from launcher.places.sagemaker import aws
from stoker.config.loading import load
from stoker.errors import UsageError
from stoker.events import prices
from stoker.events.cost import cost_row, run_cost
from stoker.events.runs import shape_of
from stoker.events.summary import Summary
from stoker.hosts.cluster import labels_of
from stoker.hosts.topology import resolve

REGION_FILTER = [
    {"Type": "TERM_MATCH", "Field": "regionCode", "Value": "eu-west-1"},
    {"Type": "TERM_MATCH", "Field": "productFamily", "Value": "ML Instance"},
]


def product(usage_type: str, price: str, unit: str = "Hrs") -> str:
    """One entry of AWS's price list, in the shape of GetProducts, formatVersion aws_v1."""
    return json.dumps(
        {
            "product": {
                "productFamily": "ML Instance",
                "sku": "ABC",
                "attributes": {
                    "regionCode": "eu-west-1",
                    "usagetype": usage_type,
                    "servicecode": "AmazonSageMaker",
                },
            },
            "serviceCode": "AmazonSageMaker",
            "terms": {
                "OnDemand": {
                    "ABC.JRTCKXETXF": {
                        "offerTermCode": "JRTCKXETXF",
                        "priceDimensions": {"ABC.1": {"unit": unit, "pricePerUnit": {"USD": price}}},
                    }
                }
            },
            "publicationDate": "2026-11-20T00:00:00Z",
        }
    )


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "config" / "prices.json"
    monkeypatch.setenv(prices.FILE_VARIABLE, str(file))
    return file


@pytest.fixture
def price_service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stubber]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    client: Any = boto3.session.Session().client("pricing", region_name="us-east-1")
    monkeypatch.setattr(
        aws, "client", lambda service, region: {("pricing", "us-east-1"): client}[service, region]
    )
    with Stubber(client) as stubber:
        yield stubber


class TestUpdate:
    def test_keeps_the_training_prices_of_all_pages(
        self, price_service: Stubber, own_file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        query: dict[str, Any] = {"ServiceCode": "AmazonSageMaker", "Filters": REGION_FILTER}
        first = [
            product("EU-Train:ml.g5.xlarge", "1.5700000000"),
            product("EU-Notebk:ml.g5.xlarge", "9.9"),
            product("EU-Train:ml.c5.4xlarge", "0.0000000000"),
        ]
        second = [
            product("EU-Train:ml.c5.4xlarge", "0.9220000000"),
            product("EU-SpotTrain:ml.m5.xlarge", "0.1"),
        ]
        price_service.add_response("get_products", {"PriceList": first, "NextToken": "more"}, query)
        price_service.add_response("get_products", {"PriceList": second}, query | {"NextToken": "more"})
        assert pricing.show("eu-west-1", update=True) == 0
        written = json.loads(own_file.read_text())["eu-west-1"]
        assert written["usd_per_hour"] == {"ml.c5.4xlarge": 0.922, "ml.g5.xlarge": 1.57}
        out = capsys.readouterr().out
        assert f"estimated, prices of {written['as_of']} (eu-west-1 on demand)" in out
        price_service.assert_no_pending_responses()

    def test_without_permission_one_line(self, price_service: Stubber, own_file: Path) -> None:
        price_service.add_client_error("get_products", "AccessDeniedException", "not allowed")
        with pytest.raises(UsageError, match=r"AWS prices: GetProducts: AccessDenied.*docs/iam") as raised:
            pricing.show("eu-west-1", update=True)
        assert len(raised.value.problems) == 1 and not own_file.exists()

    def test_offline_one_line(self, own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        client: Any = boto3.session.Session().client(
            "pricing", region_name="us-east-1", endpoint_url="http://127.0.0.1:9"
        )
        monkeypatch.setattr(aws, "client", lambda service, region: client)
        with pytest.raises(UsageError, match="AWS prices: Could not connect"):
            pricing.show("eu-west-1", update=True)
        assert not own_file.exists()

    def test_a_region_without_training(self, price_service: Stubber, own_file: Path) -> None:
        price_service.add_response("get_products", {"PriceList": []})
        with pytest.raises(
            UsageError, match="--region eu-west-1: the AWS price list has no training instances"
        ):
            pricing.show("eu-west-1", update=True)


class TestWhichList:
    def test_the_newer_one_of_a_region(self, own_file: Path) -> None:
        assert prices.price_list().label == "estimated, prices of 2026-11 (us-east-1 on demand)"
        prices.write_user_file("us-east-1", "2026-12-01", {"ml.g5.xlarge": 1.3})
        prices.write_user_file("eu-west-1", "2026-12-02", {"ml.g5.xlarge": 1.6})
        assert prices.price_list().usd_per_hour("ml.g5.xlarge", 2) == 2.6
        assert prices.price_list("eu-west-1").usd_per_hour("ml.g5.xlarge") == 1.6
        assert prices.price_list("eu-west-1").as_of == "2026-12-02"
        prices.write_user_file("us-east-1", "2025-01-01", {"ml.g5.xlarge": 9.9})
        assert prices.price_list().usd_per_hour("ml.g5.xlarge") == 1.408

    def test_an_unknown_region_is_estimated_from_the_table_and_says_so(self, own_file: Path) -> None:
        assert prices.price_list("eu-west-1").label == "estimated, prices of 2026-11 (us-east-1 on demand)"

    def test_own_prices_go_first_and_are_named(self, own_file: Path) -> None:
        known = prices.price_list(None, {"ml.g5.xlarge": 1.2, "office": 0.5})
        assert known.usd_per_hour("ml.g5.xlarge", 3) == pytest.approx(3.6)
        assert known.usd_per_hour(None, group="office") == 0.5
        assert known.usd_per_hour(None, group="lab") is None
        assert known.label.endswith("own prices for ml.g5.xlarge, office)")

    def test_a_file_that_is_none_counts_as_absent(self, own_file: Path) -> None:
        own_file.parent.mkdir()
        for content in (
            "",
            "[]",
            '{"us-east-1": 3}',
            '{"us-east-1": {"as_of": "2027", "usd_per_hour": {"a": "x"}}}',
        ):
            own_file.write_text(content)
            assert prices.price_list().as_of == "2026-11"

    def test_the_newer_list_travels_with_the_job(self, own_file: Path, tmp_path: Path) -> None:
        prices.write_user_file("us-east-1", "2026-12-01", {"ml.g5.xlarge": 1.3})
        open_job(load(None, [])).stage(tmp_path / "code")
        assert (tmp_path / "code" / "prices.json").read_text() == own_file.read_text()

    def test_mistyped_own_prices_are_refused(self) -> None:
        with pytest.raises(
            UsageError, match=r"sagemaker\.prices\.ml\.g5\.xlarge: .*greater than or equal to 0"
        ):
            load(None, ["sagemaker.prices={ml.g5.xlarge: -1}"])


def summary_of(*hosts: tuple[str, str | None]) -> Summary:
    rows = [
        {"host": f"algo-{i}", "group": group, "cpus": 4, "gpus": 0, "ip": "", "type": kind}
        for i, (group, kind) in enumerate(hosts, 1)
    ]
    return Summary.model_validate(
        {
            "seconds": 3500,
            "cluster": {"hosts": rows, "formed_s": 100},
            "speed": {"steady_samples_per_s": 1000},
        }
    )


class TestCostOfARun:
    two = (("gpu", "ml.g5.xlarge"), ("cpu", "ml.c5.4xlarge"))

    def test_of_known_types(self) -> None:
        cost = run_cost(summary_of(*self.two), prices.price_list())
        assert cost is not None
        assert cost["usd_per_hour"] == pytest.approx(2.224)
        assert cost["usd"] == pytest.approx(2.224)
        assert cost["usd_per_million_samples"] == pytest.approx(2.224 / 3.6, abs=1e-4)
        assert (cost["prices_as_of"], cost["estimated"]) == ("2026-11", True)

    def test_a_lost_host_and_its_replacement_cost_what_the_time_of_each_costs(self) -> None:
        """The CPU host was there for the first half of the hour, another from the last quarter on."""
        summary = summary_of(*self.two, ("cpu", "ml.c5.4xlarge"))
        head, lost, new = summary.cluster.hosts
        head.since = lost.since = 1000.0
        lost.until, new.since = 1000.0 + 1700, 1000.0 + 2600
        cost = run_cost(summary, prices.price_list())
        whole = run_cost(summary_of(*self.two), prices.price_list())
        assert cost and whole
        by_type = cost["usd_per_hour_by_type"]
        assert cost["usd"] == pytest.approx(by_type["ml.g5.xlarge"] + 0.75 * by_type["ml.c5.4xlarge"])
        assert cost["usd_per_hour"] == cost["usd"] < whole["usd"]
        assert shape_of(summary) == "1 × gpu (ml.g5.xlarge) + 1 × cpu (ml.c5.4xlarge)"

    def test_earlier_starts_elsewhere_are_estimated_by_the_hosts_of_this_one(self) -> None:
        summary = summary_of(*self.two)
        summary.earlier_s = 1750
        cost = run_cost(summary, prices.price_list())
        assert cost and cost["usd"] == pytest.approx(cost["usd_per_hour"])

    def test_none_where_one_host_has_no_price(self) -> None:
        assert run_cost(summary_of(*self.two, ("cpu", None)), prices.price_list()) is None
        assert run_cost(summary_of(("local", None)), prices.price_list()) is None
        own = run_cost(summary_of(("local", None)), prices.price_list(None, {"local": 0.5}))
        assert own and own["usd_per_hour"] == 0.5

    def test_closing_row(self) -> None:
        summary = summary_of(*self.two)
        assert cost_row(summary) is None
        summary.cost = run_cost(summary, prices.price_list())
        assert cost_row(summary) == (
            "cost",
            "$2.22, $0.62 per 1M samples at the steady rate (estimated, prices of 2026-11 in us-east-1)",
        )
        assert summary.cost is not None
        spot = summary.model_copy(update={"cost": summary.cost | {"saved_by_spot_usd": 0.5}})
        assert "$0.50 saved against on-demand CPU hosts" in cost_row(spot)[1]  # type: ignore[index]
        summary.backend = "rehearsal"
        assert "as if the rehearsed hosts were real" in cost_row(summary)[1]  # type: ignore[index]

    def test_hosts_tell_their_type_by_a_label(self) -> None:
        resource = {
            "current_host": "algo-2",
            "hosts": ["algo-1", "algo-2"],
            "instance_groups": [
                {"instance_group_name": "gpu", "instance_type": "ml.g5.xlarge", "hosts": ["algo-1"]},
                {"instance_group_name": "cpu", "instance_type": "ml.c5.4xlarge", "hosts": ["algo-2"]},
            ],
        }
        assert labels_of(resolve(resource))["stoker.type"] == "ml.c5.4xlarge"
        assert "stoker.type" not in labels_of(resolve({"current_host": "a", "hosts": ["a"]}))
