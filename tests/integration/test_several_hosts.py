"""Chain tasks on several hosts: CPU hosts first, late ones too; what a lost one had comes another way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.ray_nodes import RayNodes

pytestmark = [pytest.mark.long, pytest.mark.timeout(1600)]

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def seen(nodes: RayNodes) -> dict[str, Any]:
    process = subprocess.run(
        [sys.executable, str(HERE / "several_hosts.py")],
        env=nodes.environment | {"STOKER_TEST_NODES": json.dumps(nodes.address())},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    print(process.stderr)
    assert process.returncode == 0, process.stderr[-4000:]
    found: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found


def test_hosts_that_train_help_only_while_data_is_short(seen: dict[str, Any]) -> None:
    placement = seen["placement"]
    enough, hungry = placement["enough"], placement["hungry"]
    assert enough.get("gpu-0", 0) < 0.1 * sum(enough.values())
    assert min(enough["cpu-1"], enough["cpu-2"]) > 0.25 * sum(enough.values())
    assert hungry["gpu-0"] > 0.15 * sum(hungry.values())
    assert placement["each_once"]


def test_a_slow_sample_holds_nobody_back_unless_the_order_is_exact(seen: dict[str, Any]) -> None:
    slow = seen["slow_sample"]
    assert slow["any"]["whole"]
    # It took until 250 others were done; how many of these had arrived by then depends on the load.
    assert slow["any"]["at"] > 50, "blocks that began after its own came before"
    assert slow["exact"] == {"at": 0, "seeded": True, "whole": True}


def test_another_host_that_trains_gets_what_the_head_made(seen: dict[str, Any]) -> None:
    assert seen["made_on_the_head"]["whole"], "over sockets and over Ray"
    assert seen["made_on_the_head"]["left"] == 1, (
        "the next request over Ray drops what was taken before"
    )


def test_a_lost_block_server_costs_no_row(seen: dict[str, Any]) -> None:
    lost = seen["lost_server"]
    assert lost["before"]["direct"] > 0
    assert lost["after"]["direct"] > lost["before"]["direct"], "the other host still serves"
    assert lost["books"]["trained"] == lost["books"]["read"] == 3000, "each once, by their ids"
    assert lost["values"] and lost["tails"], "with their own content, of one length and of any"
    assert any("the agent on host" in text and "made again" in text for text in lost["notes"])


def test_an_agent_that_dies_is_started_again_and_noted(seen: dict[str, Any]) -> None:
    found = seen["dying_agents"]
    assert len(found["ports"]) == 3, "three agents of one host, one after the other"
    died = [text for text in found["notes"] if "died" in text]
    assert len(died) == 2
    assert all("the agent on host" in text and "restarting it" in text for text in died)
    assert "its process ended" in died[0]
    assert found["rows"] == 200
    assert found["sampled"], "its CPUs, too"


def test_an_agent_that_never_answers_counts_as_dead_and_is_started_again(
    seen: dict[str, Any],
) -> None:
    found = seen["silent_agents"]
    assert found["died"] and found["served"]
    assert all(
        "died (no answer within 4 s)" in text and "restarting it" in text for text in found["notes"]
    )


def test_hosts_whose_agents_die_again_and_again_get_no_more_work_and_others_do_it(
    seen: dict[str, Any],
) -> None:
    found = seen["given_up"]
    ends = [text for text in found["notes"] if "restarting it" not in text]
    assert len(ends) == 2, "one line for each host"
    assert all("after 4 deaths in an hour, others do its work for" in text for text in ends)
    assert set(found["made"]) == {"gpu-0"} and found["made"]["gpu-0"] > 20
    assert found["books"]["trained"] == found["books"]["read"] == 8_000 and found["each_once"]


def test_each_host_keeps_a_part_of_its_own(seen: dict[str, Any]) -> None:
    first, *later = seen["cached"]["passes"]
    # Passes overlap, so a late worker of the first may find what the second has kept.
    assert first["found"] < 0.1 * 4200
    # Where one host's processes start later, the other does some of its shards, and does not keep them.
    assert later[-1]["found"] > 0.5 * 4200
    held = [host["bytes"] for host in later[-1]["hosts"].values()]
    assert len(held) == 2
    assert max(held) < 0.8 * sum(held), "neither keeps everything"


def test_a_host_that_is_about_to_be_taken_away_gets_no_more_work_and_others_go_on(
    seen: dict[str, Any],
) -> None:
    spot = seen["drained"]
    assert spot["used"] and spot["noted"]
    assert spot["emptied"] and spot["others"], "its chain workers end, and those of others go on"
    assert spot["more"] == 0, "it gets no more work"
    assert spot["books"]["read"] == spot["books"]["trained"] == 6_000 and spot["each_once"]
    assert spot["rescued"] and spot["again"] == [], (
        "its ready blocks were copied, so none is made again"
    )


def test_a_host_that_is_lost_in_the_middle_of_long_shards_blocks_nothing_while_no_more_fits(
    seen: dict[str, Any],
) -> None:
    lost = seen["lost_while_full"]
    assert all(lost["full"]) and max(lost["made"]) < 0.8 * 1000, (
        "shards of 40 blocks, and room for some of them"
    )
    assert all(lost["each_once"])
    assert all(books["read"] == books["trained"] == 10_000 for books in lost["books"])
    for notes in lost["notes"]:
        # Which comes first, the lost blocks made again or the rest of their shard elsewhere, is open.
        assert any("Input/output error" in text for text in notes), (
            "shards could not be read at once"
        )


def test_a_late_host_is_used_and_groups_are_a_restriction(seen: dict[str, Any]) -> None:
    assert seen["drained"]["used"], "it has joined a running job"
    hosts = seen["lost_alone"]
    assert [name.partition("-")[0] for name in hosts["alone"]] == ["extra"]
    assert "no preprocessing host for 10 s: data.preprocess_on allows only extra" in hosts["said"]
