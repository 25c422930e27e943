"""Many streams at once from one process that costs next to nothing: plain sockets, no HTTP library, no model.

Reads one JSON object a line from standard input, `{"host", "port", "streams", "tokens"}`, opens so many streams at
`/v1/completions`, and answers with a line, `{"seconds", "first", "events"}`: from the first byte sent to the last stream's end,
to the slowest stream's first event, and how many events came. `serve_overhead.py` runs it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

PROMPT = "Write a long story about a lighthouse. ({})"
END = b"data: [DONE]"
EVENT = b"data: {"


def request(n: int, tokens: int) -> bytes:
    """The bytes of request `n`: greedy, just so many tokens."""
    asked = {"prompt": PROMPT.format(n), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body


async def stream(host: str, port: int, asked: bytes) -> tuple[float, int]:
    """When the first event came, and how many did. Raises `RuntimeError` for anything but a whole stream."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(asked)
    first, events, tail, ended = 0.0, 0, b"", False
    while part := await reader.read(1 << 16):
        seen = tail + part
        events += seen.count(EVENT)
        first = first or (time.perf_counter() if events else 0.0)
        ended = ended or END in seen
        tail = seen[-len(END) + 1 :]
        events -= tail.count(EVENT)  # counted again with what follows
    writer.close()
    if not ended:
        raise RuntimeError(f"a stream broke off: {seen[:300]!r}")
    return first, events + tail.count(EVENT)


async def run(host: str, port: int, streams: int, tokens: int) -> dict[str, float]:
    asked = [request(n, tokens) for n in range(streams)]
    started = time.perf_counter()
    found = await asyncio.gather(*(stream(host, port, one) for one in asked))
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "first": max(first for first, _ in found) - started, "events": sum(n for _, n in found)}


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(asyncio.run(run(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
