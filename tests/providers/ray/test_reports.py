"""What a driver says on its way, and what users are told of it."""

from __future__ import annotations

import json

from skyward.providers.ray import driver
from skyward.providers.ray.jobs import Busy, DriverReport, NothingFits, amounts, read_reports

NODES = [{"address": "10.0.0.2", "resources": {"CPU": 4.0, "GPU": 2.0, "memory": 16e9}}]


def said(*messages: object) -> DriverReport:
    return read_reports([driver.MARK + json.dumps(message) for message in messages])


def test_lines_that_the_driver_did_not_write_do_not_count() -> None:
    lines = ["Running entrypoint", "skyward: nonsense", 'skyward: ["placed"]', 'skyward: {"waiting": 7}', ""]
    assert read_reports(lines) == DriverReport()


def test_the_user_is_told_what_is_waited_for() -> None:
    assert said().progress(2, "2 x (1 CPU)") == "Ray: the driver is starting"
    queued = {"waiting": "QUEUED", "nodes": NODES}
    assert said(queued).progress(2, "2 x (1 CPU)") == "Ray has no room yet for 2 x (1 CPU)"
    placed = said(queued, {"placed": 2}, {"started": 0, "address": "10.0.0.2"})
    assert placed.progress(2, "2 x (1 CPU)") == "Ray: 1 of 2 places started"


def test_the_user_is_told_what_is_asked_for_and_what_is_free() -> None:
    free = [{**NODES[0], "resources": {"CPU": 4.0, "memory": 16e9}, "free": {"CPU": 1.0, "memory": 2e9}}]
    found = said({"waiting": "QUEUED", "nodes": NODES}, {"free": free})
    room = "10.0.0.2: 1 of 4 CPU, 2 of 16 GB of memory"
    assert found.progress(1, "1 x (2 CPU)") == f"Ray has no room yet for 1 x (2 CPU); free: {room}"
    text = str(Busy("1 x (2 CPU)", found.free))
    assert "Ray had no room for 1 x (2 CPU)" in text
    assert room in text


def test_what_no_node_has_is_said_with_what_they_have() -> None:
    found = said({"infeasible": {"GPU": 8, "CPU": 1}, "nodes": NODES})
    assert found.infeasible == "1 CPU, 8 GPU"
    text = str(NothingFits(found.infeasible, "http://head:8265", found.nodes))
    assert "10.0.0.2: 4 CPU, 2 GPU, 16 GB of memory" in text
    assert "autoscaling=True" in text
    assert "provision_timeout" in str(Busy("2 x (1 CPU)", found.nodes))


def test_a_loss_counts_also_when_another_joiner_runs_there_already() -> None:
    started, ended = {"started": 0, "address": "10.0.0.2"}, {"ended": 0, "why": "its machine died", "given_up": False}
    assert said(started, ended).started == {}
    again = said(started, ended, started)
    assert again.losses == {0: ["its machine died"]}
    assert set(again.started) == {0}


def test_a_machine_that_was_sent_away_is_not_lost() -> None:
    assert said({"started": 0, "address": "x"}, {"ended": 0, "why": ""}).losses == {}


def test_of_rays_text_about_an_actor_only_the_reason_is_shown() -> None:
    told = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: Joiner\n\tactor_id: 8d1f\n\tpid: 77\n"
        "\tname: skyward-p-0-1\n\tnamespace: skyward\n\tip: 10.0.0.2\n"
        "The actor is dead because its node has died. Node Id: 12ab"
    )
    assert driver.reason(told) == "The actor is dead because its node has died. Node Id: 12ab"
    assert driver.reason("The worker died.") == "The worker died."
    assert driver.reason("") == ""


def test_amounts_are_written_as_people_say_them() -> None:
    assert amounts({"memory": 8e9, "GPU": 1, "CPU": 4, "accelerator_type:A100": 0.001}) == (
        "4 CPU, 1 GPU, A100, 8 GB of memory"
    )
