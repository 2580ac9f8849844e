"""Process that checks grammars, each in a child of its own, which limits of time and memory end.

:mod:`.checks` runs this file as a script. It imports nothing of apbv, whose libraries take seconds
to import and would be in the memory of every child. Its standard input is a Unix socket, over which
further sockets come: the first one brings the description of the tokenizer, and each of the others
a check, whose verdict goes back over it. It ends when the other end of its standard input is
closed.
"""

import json
import os
import random
import resource
import signal
import socket
from contextlib import suppress
from typing import Any

# The first byte of every reply; a child that a limit ended sends no verdict after it.
STARTED = b"+"
# Seconds on the clock for each second of CPU time, after which a child ends in any case.
_WALL_FACTOR = 4.0
# An answer is begun, as some grammars compile and then allow no token, or have too many rules for
# the second one.
_NUM_STEPS = 64
# Preferred half of the time, so that the answer comes past its first text.
_ENDINGS = ('"', "}", "]", ",", ", ")


def main() -> None:
    """Serve checks until the socket's other end is closed."""
    from llguidance import LLTokenizer

    # A terminal sends it to the parent, too, which decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests = socket.socket(fileno=0)
    first_channel = _next_channel(requests)
    assert first_channel is not None  # the parent sends it before anything else
    with first_channel:
        description = json.loads(_read_all(first_channel))
    tokenizer = LLTokenizer(
        description["tokenizer"],
        n_vocab=description["vocab_size"],
        eos_token=description["eos_tokens"],
    )
    while (channel := _next_channel(requests)) is not None:
        with channel:
            if os.fork() == 0:
                _serve(channel, tokenizer)


def _next_channel(requests: socket.socket) -> socket.socket | None:
    """Return the next socket that the parent sends; None if there will be none."""
    _, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def _read_all(channel: socket.socket) -> bytes:
    """Return all that the other end sends until it closes its direction."""
    pieces = []
    while piece := channel.recv(2**16):
        pieces.append(piece)
    return b"".join(pieces)


def _serve(channel: socket.socket, tokenizer) -> None:
    """Check a grammar and end this process, which is a child."""
    status = 1
    try:
        channel.sendall(STARTED)
        request = json.loads(_read_all(channel))
        # The allocator writes to stderr when the memory is used up.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        _limit(request["cpu_seconds"], request["memory_bytes"])
        reason = reason_against(tokenizer, request["grammar"])
        channel.sendall(json.dumps(reason).encode())
        status = 0
    finally:
        os._exit(status)


def _limit(cpu_seconds: float, memory_bytes: int) -> None:
    """Let the kernel end this process after some CPU time, and bound the memory that it adds."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, _WALL_FACTOR * cpu_seconds)
    with suppress(OSError, ValueError):  # systems other than Linux tell or limit it differently
        with open("/proc/self/statm", encoding="ascii") as file:
            num_pages = int(file.read().split()[0])
        limit = num_pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def reason_against(tokenizer, grammar: str) -> str:
    """Compile a grammar, and begin an answer that follows it.

    Args:
        tokenizer: llguidance's ``LLTokenizer``.
        grammar: in the form that its ``LLMatcher`` takes.

    Returns:
        Why the grammar cannot be used, as the end of a sentence; empty if it can.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        return f"is not supported: {_first_line(matcher)}"
    endings = []
    for text in _ENDINGS:
        tokens = tokenizer.tokenize_str(text)
        if len(tokens) == 1:
            endings += tokens
    draw = random.Random(0)
    for _ in range(_NUM_STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():
            break
        matcher.consume_token(_draw_token(draw, mask, endings))
    if not matcher.is_error():
        return ""
    reason = _first_line(matcher)
    if reason.startswith("NoExtension"):
        return "allows no answer that ends: it may refer to itself in a loop"
    return f"is too complex: {reason}"


def _draw_token(draw: random.Random, mask: bytes, endings: list[int]) -> int:
    """Draw a token that a mask allows; bit i of the mask's byte b is token 8 b + i's."""
    allowed_endings = [token for token in endings if mask[token // 8] >> (token % 8) & 1]
    if allowed_endings and draw.random() < 0.5:
        return draw.choice(allowed_endings)
    # The first byte with a token from a random place on, or from the beginning.
    start = draw.randrange(len(mask))
    rest = mask[start:].lstrip(b"\0")
    if not rest:
        rest = mask.lstrip(b"\0")
    index = len(mask) - len(rest)
    bits = [bit for bit in range(8) if mask[index] >> bit & 1]
    return 8 * index + draw.choice(bits)


def _first_line(matcher: Any) -> str:
    """Return a matcher's error without the parser's state."""
    return matcher.get_error().partition("\n")[0].partition(";")[0][:200]


if __name__ == "__main__":
    main()
