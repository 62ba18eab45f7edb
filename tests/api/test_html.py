"""Values as a notebook shows them."""

from __future__ import annotations

import re
from html import unescape

from skyward.api.html import bar, card, status, table
from skyward.api.spec import Spec
from skyward.machines.acquire import Plans
from skyward.machines.cloud import Bill, CloudReceipt
from skyward.machines.offers import CloudOffer, Plan, Price, RuledOut, wish


def text(html: str) -> str:
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html)))


def test_a_receipt_is_a_table_of_machines_with_the_total_below() -> None:
    bill = Bill("i-1", "g4dn.xlarge", "us-east-1a", "spot", 1800, Price(0.1578, 0.02, 0.005))
    html = CloudReceipt("p", "us-east-1", (bill,), ("i-1",), ("i-1",), ("<b>a remark",))._repr_html_()
    assert "pool p in us-east-1: 1 thing created, 1 confirmed gone" in text(html)
    assert "i-1 g4dn.xlarge spot, us-east-1a 1,800 $0.0914" in text(html)
    assert "total $0.0914 (machine $0.0789" in text(html)
    assert "<b>a remark" in text(html)
    assert "<b>a remark" not in html


def test_a_plan_is_a_table_of_what_is_tried_in_order() -> None:
    offers = tuple(
        CloudOffer("", n, kind=f"g{n}.xlarge", zone="a", market="spot", accelerator="T4", accelerators=1)
        for n in range(1, 11)
    )
    html = Plan("AWS", wish(Spec(nodes=4)), 4, offers, (RuledOut("x", "too small"),), ("a note",))._repr_html_()
    assert "4 nodes, spot-if-available, from AWS" in text(html)
    assert "1 4 x g1.xlarge (spot, a) 1 x T4 $4.00 an hour" in text(html)
    assert "... and 2 more" in text(html)
    assert "ruled out: x: too small a note" in text(html)
    assert "nothing fits" in text(Plan("AWS", "w", 1, ())._repr_html_())
    assert "<table" not in Plan("AWS", "w", 1, ())._repr_html_()


def test_plans_for_several_specs_say_in_which_order() -> None:
    assert "0 specs, tried by price" in text(Plans((), "cheapest")._repr_html_())


def test_everything_is_escaped() -> None:
    bad = "<script>alert(1)</script>"
    for html in (
        card(bad, {bad: bad}),
        table(bad, [bad], [[bad]], [bad]),
        bar(bad, bad, 0.5, "running"),
        status(bad, bad, "done"),
    ):
        assert "<script>" not in html
        assert html.count("&lt;script&gt;") >= 2


def test_lines_stay_lines() -> None:
    assert "one<br>two" in card("t", {"a": "one\ntwo"})
