"""Guards against forwarders that wait for ever, or write into rows of others, when a message is not so (R7, R19).

And against ranks that go on putting chunks and giving credits behind a failure (R9).

docs/protocols/nodes.md, "Waits and errors".
"""

import dataclasses
import threading
from typing import Any

import pytest
from dispatch_cases import Case
from kernels import Compiler, Mutant
from machine import Streams
from node_cases import with_nodes
from test_emulated_failures import BAD_PEER_WORD, DEADLINE, words
from test_emulated_node_experts import MASKED
from test_emulated_nodes import TWO

LIAR, FORWARDER = 1, 3  # ranks: that says it, and that tells the other node

# Which lie it is says an argument that these kernels do not look at.
LIES = {
    "more tokens than a call may have": (2, (2, 3)),
    "more rows for a rank": (3, (FORWARDER,)),
    "fewer rows for a rank": (4, (FORWARDER,)),
    "a token less": (5, (FORWARDER,)),
    "no expert of a token": (6, (FORWARDER,)),
}
# By expert, of masked, which has no alignment: only who forwards reads the picks themselves.
PICK_LIES = {"no expert of a token": 6, "more picks of an expert": 7, "fewer picks of an expert": 8}
PUT = "    meet();\n    const i32 node = thread();\n    if (node < kNodes && s.forwarder[node] >= 0) nodes_.put_message"
LYING = Mutant(
    "a rank's message is not so",
    "weft/kernels/dispatch/messages.cuh",
    PUT,
    f"""
    meet();
    if (rank() == {LIAR} && thread() == 0) {{
      u8* message = nodes_.message_to({FORWARDER});
      auto* payload = reinterpret_cast<GpuCountPayload*>(reinterpret_cast<RailMessage*>(message)->payload);
      auto* rows = reinterpret_cast<i32*>(message + nodes_.layout().counts(0));
      auto* tokens = reinterpret_cast<u32*>(message + nodes_.layout().tokens());
      auto* experts = reinterpret_cast<u16*>(message + nodes_.layout().experts(a.num_tokens));
      if (a.alignment == 2) payload->num_tokens = i64{{1}} << 40;
      if (a.alignment == 3) ++*rows;
      if (a.alignment == 4) --*rows;
      if (a.alignment == 5) *tokens &= *tokens - 1;
      for (i32 k = 0; k < kTopk && a.alignment == 6; ++k) experts[k] = 0x7000;
      if (a.alignment == 7) ++rows[1];
      if (a.alignment == 8) --rows[1];
    }}
{PUT}""",
)
# In the last block, which alone looks at them.
COUNTED = "    s.next_token[source] = begin;\n"
CLEARED = Mutant(
    "a message loses its tokens when they have been counted",
    "weft/kernels/dispatch/nodes.cuh",
    COUNTED,
    f"""{COUNTED}
    if (rank() == {FORWARDER} && source == {LIAR} && block() == kConfig.num_blocks - 1) {{
      for (i32 group = begin / 32; group * 32 < end; ++group) {{
        const_cast<u32*>(bits)[group] &= ~this->bits_between(group, begin, end);
      }}
    }}
""",
)


LONG_NS = 600_000_000_000


def _end_when_found(runner: Any, finders: tuple[int, ...], has_ended: threading.Event) -> None:
    """The others wait for those that have found it: as long as that takes, and no longer."""
    while not has_ended.wait(0.01):
        if all(words(runner, rank)["broken"] != 0 for rank in finders):
            runner.world.set_timeout(0)
            return


def _expect_found(compiler: Compiler, mutant: Mutant, finders: tuple[int, ...], lie: int = 1, case: Case = TWO) -> None:
    runner = with_nodes(compiler, dataclasses.replace(case, num_rounds=1), 2, mutant)
    runner.add_round()
    launch = runner.streams[LIAR][0]
    runner.streams[LIAR][0] = dataclasses.replace(launch, fields={**launch.fields, "alignment": lie})
    runner.world.set_timeout(LONG_NS)
    has_ended = threading.Event()
    watcher = threading.Thread(target=_end_when_found, args=(runner, finders, has_ended))
    watcher.start()
    try:
        try:
            Streams(runner.memory, runner.streams, seed=1, timeout_s=LONG_NS / 1e9).run()
        finally:
            has_ended.set()
            watcher.join()
        for rank in finders:
            seen = words(runner, rank)
            assert seen.pop("broken") in (BAD_PEER_WORD, DEADLINE)  # a block that still waited has written it since
            assert seen == {"cause": BAD_PEER_WORD, "culprit": LIAR, "owner": 1, "sequence": 0}
        assert runner.memory.written_red_zones() == []
    finally:
        runner.memory.close()


@pytest.mark.parametrize("name", LIES)
def test_a_message_that_is_not_so(compiler: Compiler, name: str) -> None:
    """It ends with the name of the rank that has said it."""
    lie, finders = LIES[name]
    _expect_found(compiler, LYING, finders, lie)


@pytest.mark.parametrize("name", PICK_LIES)
def test_a_message_that_is_not_so_by_expert(compiler: Compiler, name: str) -> None:
    """The same of picks: no row is stored where another source has its own."""
    case = dataclasses.replace(MASKED, is_repeated=False)
    _expect_found(compiler, LYING, (FORWARDER,), PICK_LIES[name], case)


def test_a_message_that_changes(compiler: Compiler) -> None:
    """The rows that were counted are not there: nobody looks for them behind the message."""
    _expect_found(compiler, CLEARED, (FORWARDER,))


FOUND = "    i32 found = kEndOfItems;\n    const auto look = [&] {\n      if (has_failed()) return true;\n"
GOES_WRONG = Mutant(
    "a rank goes wrong, and an item of each block is on its way",
    "weft/kernels/dispatch/nodes.cuh",
    FOUND,
    f"""
    i32 found = kEndOfItems, num_items = token - this->queue_begin(block(), a.num_tokens);
    for (i32 from = 0; from < kRanks; ++from) num_items += s.num_loaded[from];
    const bool is_first = num_items == 0 && rank() == {FORWARDER};
    if (is_first) this->fail(transport::ErrorCause::kDeadline, Phase::kSend, rank());
    const auto look = [&] {{
      if (has_failed() && !is_first) {{
        for (i32 turn = 0; turn < 1000; ++turn) ptx::nanosleep(0);  // that item may be told
        return true;
      }}
""",
)


def test_nothing_is_put_behind_a_failure(compiler: Compiler) -> None:
    """Nor is a credit given, though the item is stored and makes a chunk complete."""
    runner = with_nodes(compiler, dataclasses.replace(TWO, num_rounds=1), 2, GOES_WRONG, chunk_rows=1)
    runner.add_round()
    try:
        Streams(runner.memory, runner.streams, seed=1, timeout_s=60).run()
        wanted = {"cause": DEADLINE, "culprit": FORWARDER, "broken": DEADLINE, "owner": 1, "sequence": 0}
        assert words(runner, FORWARDER) == wanted
        assert runner.nodes.chunks(FORWARDER) == (0, 0)
        assert runner.nodes.chunks(LIAR) > (0, 0)
    finally:
        runner.memory.close()
