"""Planted bugs that interrupts, threads and users' functions expose; most of them existed once."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

_ONE_LINE = "  # fmt: skip  # noqa: E702 - one line: nothing may come in between"
_POLL = f"out[0] = 1; return message{_ONE_LINE}"
_CONSUME = f"out[0] = ALL; return ours{_ONE_LINE}"
_ITERATE_GRANTED = f"out[0] = count; yield message{_ONE_LINE}"
_BATCH = f"answer.receipt.out = True; yield batch{_ONE_LINE}"
_BATCH_GRANTED = f"out[0] = ALL; yield batch{_ONE_LINE}"

FAULTS: tuple[Mutation, ...] = (
    # A read that fails after taking messages.
    Mutation(
        "a read under way is not marked",
        "Fetcher.pump",
        "self._is_torn = True",
        "self._is_torn = False",
        "P6",
    ),
    Mutation("a torn read is not seen", "Fetcher.pump", "if self._is_torn:", "if False:", "P6"),
    Mutation(
        "a torn read is not read again",
        "_go_back",
        "self._fetch_anew(key)",
        "pass",
        "P6",
    ),
    # Messages that have left the library, and those that have not.
    Mutation("poll: what leaves is not marked", "poll", _POLL, "return message", "C13"),
    Mutation(
        "poll: a message is marked before it leaves",
        "poll",
        "hand.taken.append(Taken([message], out, now))",
        "hand.taken.append(Taken([message], out, now)); out[0] = 1",
        "C13",
    ),
    Mutation("consume: what leaves is not marked", "consume", _CONSUME, "return ours", "C13"),
    Mutation(
        "consume: messages are marked before they leave",
        "consume",
        "now, out, ours = self._driver.now_ms(), [0], []",
        "now, out, ours = self._driver.now_ms(), [ALL], []",
        "C13",
    ),
    Mutation(
        "iterate: what is granted and leaves is not marked",
        "_iterate_granted",
        _ITERATE_GRANTED,
        "yield message",
        "C13",
    ),
    Mutation(
        "iterate: what is granted is marked before it leaves",
        "_iterate_granted",
        "messages, out = [], [0]",
        "messages, out = [], [ALL]",
        "C13",
    ),
    Mutation(
        "batches: what is granted and leaves is not marked", "_batches_granted", _BATCH_GRANTED, "yield batch", "C13"
    ),
    Mutation(
        "batches: what is granted is marked before it leaves",
        "_batches_granted",
        "hand.taken.append(Taken(messages, out, now))",
        "hand.taken.append(Taken(messages, out, now)); out[0] = ALL",
        "C13",
    ),
    Mutation("batches: what leaves is not marked", "_batches", _BATCH, "yield batch", "C14"),
    Mutation(
        "what was in doubt after an interrupt is not",
        "poll",
        "self._hand.in_doubt = True  # first: another interrupt may come at once",
        "pass",
        "C14",
    ),
    Mutation(
        "close does not withhold what is about to leave",
        "decide",
        "run.withhold(withheld)",
        "pass",
        "C13",
    ),
    Mutation(
        "poll hands out what close has reported",
        "Consumer.poll",
        "if self._closed:",
        "if False:",
        "C13",
    ),
    # Answers that did not reach the caller.
    Mutation(
        "what reached nobody is not undone",
        "undo_lost",
        "lost = [entry for entry in self._delivered if entry[0].is_gone() and not entry[0].receipt.out]",
        "lost = []",
        "C14",
    ),
    Mutation(
        "a run that a loop has left is not undone",
        "_iterate",
        "answer = self._ask(self._serve_run, run, undo=self._undo)",
        "answer = self._ask(self._serve_run, run)",
        "C14",
    ),
    Mutation(
        "a run that a loop gives back with its next question stays in flight",
        "Pull.after",
        "self._delivery.undo_run(left, now)",
        "pass",
        "C14",
    ),
    Mutation(
        "a batch that reached nobody is not undone",
        "_batches",
        "answer = self._ask(self._serve_batch, max_messages, timeout, undo=self._undo)",
        "answer = self._ask(self._serve_batch, max_messages, timeout)",
        "C14",
    ),
    Mutation(
        "a consumer that reached nobody goes on",
        "_open_consumer",
        "answer = self._driver.servants.ask(made, undo=lambda consumer: consumer._end(True))",
        "answer = self._driver.servants.ask(made)",
        "C17",
    ),
    Mutation(
        "a lease that reached nobody is kept",
        "Marshal._get",
        "answer = self._driver.servants.ask(serve, self._driver, *args, undo=undo)",
        "answer = self._driver.servants.ask(serve, self._driver, *args)",
        "C17",
    ),
    Mutation(
        "a call that was interrupted is waited for",
        "is_gone",
        "return self.receipt.left or self.answer() is None",
        "return False",
        "C14",
    ),
    Mutation(
        "there is a line between a claim and its block",
        "WithBlock",
        "__enter__ = _Itself(weakref.ref)",
        "__enter__ = lambda self: self",
        "C17",
    ),
    Mutation("an error keeps its caller's frame", "wait", "del found, error", "pass", "C14"),
    Mutation("an error keeps the frame of the job", "_carry_out", "del error  # as in Reply.wait", "pass", "C14"),
    # Threads that share a consumer.
    Mutation(
        "what another thread's hand has left is forgotten",
        "Pull._take",
        "if hand is not None and hand.run is not None and hand.run.has_left:",
        "if False:",
        "C14",
    ),
    Mutation(
        "what another thread has claimed is taken for refused",
        "GrantedPull.answered",
        "if grant.run.assignment.grant is grant:",
        "if True:",
        "C13",
    ),
    Mutation(
        "two threads read at a time",
        "Fetcher.pump",
        "with self._reading:",
        "if True:",
        "P6",
    ),
    Mutation(
        "a user's thread runs the engine itself",
        "call",
        "return self.servants.ask(lambda _: function(*args)).wait()",
        "return function(*args)",
        "C14",
    ),
    # The user's functions.
    Mutation(
        "SystemExit out of a callback is not guarded",
        "__call__",
        "except BaseException as error:  # noqa: BLE001 - sys.exit() in a callback must not end this thread",
        "except Exception as error:",
        "",
    ),
    Mutation(
        "SystemExit out of a policy is not guarded",
        "_answer",
        "except BaseException as error:  # noqa: BLE001 - a policy is the user's; this thread keeps the leases",
        "except Exception as error:",
        "",
    ),
    Mutation(
        "callbacks of librdkafka are not guarded",
        "guarded",
        'return _Token(value) if name == "oauth_cb" else Guard(name, value)',
        'return _Token(value) if name == "oauth_cb" else value',
        "",
    ),
    Mutation(
        "what a consumer's callback raised is told nobody",
        "_call",
        "except BaseException as error:  # noqa: BLE001 - the user's, on a thread of the library",
        "except () as error:",
        "",
    ),
    Mutation(
        "a callback that raises has never returned",
        "Effects._call",
        "finally:",
        "else:",
        "C17",
    ),
    # close(), from anywhere.
    Mutation(
        "close in a callback waits for close elsewhere",
        "_end",
        "if self._closed and calling.get() is not None:",
        "if False:",
        "",
    ),
    Mutation(
        "Consumer.close waits for the callback that calls it",
        "close",
        "lambda: self._end(in_callback),",
        "lambda: self._end(False),",
        "",
    ),
    Mutation(
        "Marshal.close waits for the callback that calls it",
        "run",
        "lambda: self._carry_out(driver, watchdog, release, in_callback),",
        "lambda: self._carry_out(driver, watchdog, release, False),",
        "",
    ),
    # Ends, dropped messages, memory.
    Mutation(
        "where a reader has got to is not noted",
        "_note",
        "engine.take(number, self._engine.reached, key, end, now)",
        "pass",
        "P6",
    ),
    Mutation(
        "what a reader has passed at the end is not done",
        "reached",
        "tracker.pass_over(self._covered_to, end - 1)",
        "pass",
        "P6",
    ),
    Mutation(
        "what was dropped never comes again",
        "Upkeep.check",
        "port._reclaim(now - interval_ms)",
        "pass",
        "C14",
    ),
    Mutation(
        "what fetched messages take is not looked at",
        "InFlight.room",
        "return self.half - waiting if self.message_bytes else FIRST_READ",
        "return 10_000",
        "",
    ),
    Mutation("messages are never measured", "InFlight.read", "self.most_in_hand = self.half", "pass", ""),
)
