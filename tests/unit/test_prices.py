"""Prices: which are in use, and what a run is said to have cost."""

from __future__ import annotations

import pytest

from stoker.config.places import CpuHostsConfig, VertexConfig
from stoker.config.schema import Config
from stoker.events import prices
from stoker.events.prices import cost_row, run_cost
from stoker.events.report import key_figures
from stoker.events.runs import shape_of
from stoker.events.summary import Summary
from stoker.hosts.cluster import ray_labels
from stoker.hosts.topology import resolve
from stoker_launcher.places.remote import HostGroup, cost_table


class TestWhichPrices:
    def test_own_prices_go_first_and_are_named(self) -> None:
        known = prices.price_list({"ml.g5.xlarge": 1.2, "office": 0.5})
        assert known.usd_per_hour("ml.g5.xlarge", 3) == pytest.approx(3.6)
        assert known.usd_per_hour(None, group="office") == 0.5
        assert known.usd_per_hour(None, group="lab") is None
        assert known.label.endswith("own prices for ml.g5.xlarge, office)")

    def test_a_sum_leaves_out_and_names_types_without_a_price(self) -> None:
        groups = [HostGroup("gpu", "ml.g5.xlarge", 1, ""), HostGroup("cpu", "ml.c6i.xlarge", 4, "")]
        shown = cost_table(groups, "limit", 7200, prices.price_list(region="eu-west-1"))
        assert "at most $2.82 in 2 h (limit), without ml.c6i.xlarge, whose price is not" in shown
        assert "at us-east-1's prices" in shown and "eu-west-1" in shown
        own = prices.price_list({"ml.c6i.xlarge": 0.25})
        assert "at most $4.82 in 2 h" in cost_table(groups, "limit", 7200, own)

    def test_vertexs_prices_hold_for_machines_that_the_table_lacks(self) -> None:
        kind, hosts = "c4-standard-8", summary_of(("gpu", "c4-standard-8")).cluster.hosts
        priced = Config.model_validate({"recipe": "r", "vertex": {"prices": {kind: 9.0}}})
        assert prices.prices_of(priced, hosts).usd_per_hour(kind, group="gpu") == 9.0
        by_group = {"gpu": {"machine_type": kind}, "prices": {"gpu": 8.0}}
        grouped = Config.model_validate(
            {"recipe": "r", "vertex": by_group, "sagemaker": {"prices": {"gpu": 1}}}
        )
        assert prices.prices_of(grouped, hosts).usd_per_hour(kind, group="gpu") == 8.0
        own = Config.model_validate({"recipe": "r", "sagemaker": {"prices": {"p3.2xlarge": 3}}})
        elsewhere = summary_of(("gpu", "p3.2xlarge")).cluster.hosts
        assert prices.prices_of(own, elsewhere).usd_per_hour("p3.2xlarge") == 3

    def test_a_price_that_is_computed_for_attached_gpus_is_not_called_yours(self) -> None:
        t4 = {"machine_type": "n1-standard-4", "accelerator": "NVIDIA_TESLA_T4"}
        for own, price in (
            ({}, 0.2185 + 0.35 * 1.15),
            ({"gpu": 5.0}, 5.0),
            ({"n1-standard-4": 4.0}, 4.0),
        ):
            settings = {"gpu": t4, "cpu": {"machine_type": "n1-standard-4"}, "prices": own}
            known = prices.google_prices(VertexConfig.model_validate(settings))
            assert known.usd_per_hour("n1-standard-4", group="gpu") == pytest.approx(
                price, abs=1e-3
            )
            assert ("own prices" in known.label) == bool(own)
        assert known.usd_per_hour("n1-standard-4", group="cpu") == 4.0


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
        assert cost["usd"] == pytest.approx(
            by_type["ml.g5.xlarge"] + 0.75 * by_type["ml.c5.4xlarge"]
        )
        assert cost["usd_per_hour"] == cost["usd"] < whole["usd"]
        assert shape_of(summary) == "1 × gpu (ml.g5.xlarge) + 1 × cpu (ml.c5.4xlarge)"

    def test_earlier_starts_elsewhere_are_estimated_by_the_hosts_of_this_one(self) -> None:
        summary = summary_of(*self.two)
        summary.earlier_s = 1750
        cost = run_cost(summary, prices.price_list())
        assert cost and cost["usd"] == pytest.approx(cost["usd_per_hour"])

    @pytest.mark.parametrize("place", ["sagemaker", "vertex"])
    def test_of_a_spot_job_says_in_the_words_of_the_plan_that_it_is_on_demand(
        self, place: str
    ) -> None:
        kind = {"sagemaker": "ml.g5.xlarge", "vertex": "n1-standard-4"}[place]
        for spot in (True, False):
            summary = summary_of(("gpu", kind))
            config = Config.model_validate({"recipe": "r", place: {"spot": spot}})
            known = prices.prices_of(config, summary.cluster.hosts)
            summary.cost = run_cost(summary, known)
            row, figures = cost_row(summary), key_figures(summary)
            assert row is not None
            for text in (row[1], figures[-1][2]):
                assert ("on demand; spot usually costs less" in text) == spot
            assert known.label.endswith("on demand); spot usually costs less") == spot

    def test_what_scaled_hosts_took_covers_all_starts_or_is_left_out(self) -> None:
        """Per hour: 1 for a scaled host, 2 for the rest; an hour here, one before."""
        each = {"usd_per_hour": 1, "rest_usd_per_hour": 2, "max": 2}
        summary, scaling = summary_of(*self.two), CpuHostsConfig.model_validate(each)
        summary.cluster.hosts[1].scaled = True
        names = ("usd", "cpu_host_hours")
        first = run_cost(summary, prices.price_list(), scaling)
        assert first and [first[name] for name in names] == [3, 1]
        summary.seconds, summary.earlier_s, summary.earlier_cost = 3500 + 3600, 3600, first
        both = run_cost(summary, prices.price_list(), scaling)
        assert both and [both[name] for name in names] == [6, 2]
        for unknown in (None, {"usd": 3.0}):
            summary.earlier_cost = unknown
            cost = run_cost(summary, prices.price_list(), scaling)
            assert cost and cost["usd"] == 6 and "cpu_host_hours" not in cost

    def test_none_where_one_host_has_no_price(self) -> None:
        assert run_cost(summary_of(*self.two, ("cpu", None)), prices.price_list()) is None
        assert run_cost(summary_of(("local", None)), prices.price_list()) is None
        own = run_cost(summary_of(("local", None)), prices.price_list({"local": 0.5}))
        assert own and own["usd_per_hour"] == 0.5

    def test_closing_row(self) -> None:
        summary = summary_of(*self.two)
        assert cost_row(summary) is None
        summary.cost = run_cost(summary, prices.price_list())
        assert cost_row(summary) == (
            "cost",
            "$2.22, $0.62 per 1M samples at the steady rate (estimated, prices of 2026-11 in us-east-1)",
        )
        summary.place = "rehearsal"
        assert "as if the rehearsed hosts were real" in cost_row(summary)[1]  # type: ignore[index]

    def test_hosts_tell_their_type_by_a_label(self) -> None:
        names = {"gpu": "ml.g5.xlarge", "cpu": "ml.c5.4xlarge"}
        groups = [
            {"instance_group_name": name, "instance_type": kind, "hosts": [f"algo-{name}"]}
            for name, kind in names.items()
        ]
        hosts = {"current_host": "algo-cpu", "hosts": ["algo-gpu", "algo-cpu"]}
        labels = ray_labels(resolve({**hosts, "instance_groups": groups}))
        assert labels["stoker.type"] == "ml.c5.4xlarge"
        assert "stoker.type" not in ray_labels(resolve({"current_host": "a", "hosts": ["a"]}))
