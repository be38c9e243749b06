"""Conversations in the trace: whole spans of one group, on threads where nothing overlaps."""

from __future__ import annotations

from typing import Any

from dagrl.telemetry.conversations import LONGEST_TEXT, ConversationTrace


def row(group: int, place: int, *turns: tuple[str, str, int | None, int | None]) -> dict[str, Any]:
    said = [{"role": role, "text": text, "began_ns": began, "ended_ns": ended} for role, text, began, ended in turns]
    return {"step": 4, "group": group, "place": place, "reward": 0.5, "prompt": "1+1=", "turns": said}


def test_each_turn_of_the_first_group_has_its_text_and_time() -> None:
    first = row(7, 0, ("policy", "add(1, 1)", 10, 30), ("environment", "2", 30, 35), ("policy", "It is 2.", 35, 50))
    calls, answer, end = ConversationTrace().events([first, row(8, 0, ("policy", "3", 10, 20))])
    assert [(event.name, event.start_ns, event.duration_ns) for event in (calls, answer, end)] == [
        ("policy", 10, 20),
        ("environment", 30, 5),
        ("policy", 35, 15),
    ]
    assert calls.args == {"prompt": "1+1=", "text": "add(1, 1)", "step": 4, "group": 7, "sample": 0, "reward": 0.5}
    assert "prompt" not in answer.args and answer.args["text"] == "2"


def test_conversations_at_the_same_time_are_on_different_threads() -> None:
    trace = ConversationTrace()
    rows = [row(1, 0, ("policy", "a", 10, 30)), row(1, 1, ("policy", "b", 20, 40)), row(1, 2, ("policy", "c", 30, 35))]
    threads = [event.thread for event in trace.events(rows)]
    assert threads[0] == threads[2] != threads[1]
    (later,) = trace.events([row(2, 0, ("policy", "d", 36, 60))])
    assert later.thread == threads[0], "free since 35"


def test_turns_without_a_time_are_left_out_and_long_texts_cut() -> None:
    unknown, known = ("policy", "a", None, None), ("environment", "x" * 3 * LONGEST_TEXT, 5, 6)
    (event,) = ConversationTrace().events([row(1, 0, unknown, known)])
    assert event.name == "environment" and len(str(event.args["text"])) <= LONGEST_TEXT + len(" ... ")
    assert list(ConversationTrace().events([])) == []
