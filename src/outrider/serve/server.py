"""uvicorn, with a door that closes slowly: at SIGTERM running answers are finished and new requests get 503."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import BadInput
from ..heap import frozen
from ..llm import LLM
from ..protocols import Isolating
from ..watch.labels import Labels
from .app import House, make_app
from .line import NAME, Line
from .meters import Meters
from .settings import Settings
from .worker import Worker, measure_plain

HEADER_SECONDS = 20.0
"""How long a client may take over the head of a request."""
IDLE_SECONDS = 30
"""How long a connection may stay open between requests."""
STALLED = 60.0
"""How long a client may leave what was sent to it unread."""
LINGER = 0.3
"""Seconds between the last answer's end and the closing of connections."""
log = logging.getLogger("outrider.serve")


class Patient(H11Protocol):
    """Hangs up on clients that dawdle over the head of a request, or stop reading."""

    _timer: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, NAME: Line(self)}
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self.app_state = {}
        super().connection_lost(exc)
        self._read()

    def pause_writing(self) -> None:
        """Much is unread."""
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read()

    def _await_reading(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(STALLED, self._look, unread)

    def _look(self, before: int) -> None:
        """Drop a client that has read nothing since; who has read something may go on."""
        if self.transport.get_write_buffer_size() >= before:
            self.transport.abort()
        else:
            self._await_reading()

    def _read(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _watch(self) -> None:
        """A timer runs while the head of a request is awaited; more of it does not start it anew."""
        if self.conn.their_state is not h11.IDLE:
            self._unwatch()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self._hang_up)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hang_up(self) -> None:
        self._timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()


class Server(uvicorn.Server):
    """`ready` is called once requests are taken, with the address."""

    def __init__(self, house: House, meters: Meters, ready: Callable[[str], None]) -> None:
        settings = house.settings
        options: dict[str, Any] = {
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "lifespan": "off",
            "ws": "none",
        }
        options |= {"http": Patient, "timeout_keep_alive": IDLE_SECONDS, "timeout_graceful_shutdown": 5}
        super().__init__(uvicorn.Config(make_app(house, meters), settings.host, settings.port, **options))
        self.house, self.worker, self._ready = house, house.worker, ready
        self._deadline: float | None = None
        self._quiet: float | None = None

    async def startup(self, sockets: Any = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # another server bound the same port before either listened
            where = f"{self.config.host} port {self.config.port}"
            raise BadInput(f"cannot listen at {where}: {error.strerror or error}; give another --port") from None
        if self.started:
            self._ready(self.address)

    @property
    def address(self) -> str:
        """Where the server listens; the port is the one it was given if it asked for any."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the drain, the second ends it."""
        if self._deadline is not None:
            self.should_exit = True
            return
        self.drain()

    def drain(self) -> None:
        """Take nothing new, finish what runs, then end."""
        self._deadline = time.monotonic() + self.house.settings.drain_seconds
        self.worker.drain()
        log.info("draining", extra={"fields": {"open": self.worker.open}})

    async def on_tick(self, counter: int) -> bool:
        if self.worker.failed is not None:
            self.should_exit = True
        if self._deadline is not None:
            now = time.monotonic()
            self._quiet = None if self.worker.open else (self._quiet or now)
            if now >= self._deadline or (self._quiet is not None and now - self._quiet >= LINGER):
                self.should_exit = True
        if self.should_exit:
            self.worker.close(0)  # whoever still waits is told
        return await super().on_tick(counter)


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, before the model is loaded for it. Raises `BadInput` where that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise BadInput(f"cannot listen at {host!r}: {error.strerror or error}; give another --host") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise BadInput(f"cannot listen at {host} port {port}: {error.strerror or error}; give another --port") from None
    return sock


def open_house(llm: LLM, settings: Settings) -> tuple[House, Meters]:
    """Measure the plain baseline and start the thread that runs the engine."""
    settings = settings.fitted(llm.max_model_len)
    baseline = measure_plain(llm)
    llm.engine.watch.labels = Labels()  # measuring is nobody's work
    worker = Worker(llm, settings.limit)
    llm.engine.scheduler.max_requests = llm.engine.scheduler.most = settings.max_running
    drafter = llm.engine.drafter.drafter
    if settings.api_keys and not settings.share and isinstance(drafter, Isolating):
        drafter.isolate()
    meters = Meters(worker, baseline)
    llm.engine.sinks.append(meters.observe)
    house = House(llm, settings, worker, meters.gain)
    worker.start()
    return house, meters


def serve(llm: LLM, settings: Settings, ready: Callable[[str], None], sock: socket.socket | None = None) -> str | None:
    """Serve until a signal says otherwise, at `sock` if it is given. Returns why the engine gave up, if it did."""
    house, meters = open_house(llm, settings)
    try:
        with frozen():
            Server(house, meters, ready).run(sockets=None if sock is None else [sock])
    finally:
        house.worker.close()
        house.close()
    return house.worker.failed
