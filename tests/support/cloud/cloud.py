"""An AWS on this computer that misbehaves on demand: moto behind a door that counts, delays, refuses and loses.

client -> HTTP -> Cloud (records the call, applies faults) -> Ec2 (what moto lacks) -> moto
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from skyward.errors import SkywardError
from skyward.providers.aws.provider import AWS, Pace
from skyward.testing import Call, Fault, Faults
from tests.support.cloud.ec2 import Ec2
from tests.support.cloud.machines import Hooks, Instance, Machines, Times
from tests.support.cloud.prices import TABLE
from tests.support.cloud.wire import Answer, Request, error, parse

__all__ = ["Cloud"]

_ACCOUNT = "123456789012"
_QUICK = Pace(base=0.01, cap=0.1, budget=20.0, poll=0.02, settle=0.1, unanswered=1.0, boot=1.0)


class Cloud:
    """A cloud for tests, one a process: `with Cloud() as cloud: pool = ComputePool(provider=cloud.aws(), ...)`."""

    def __init__(self, hooks: Hooks | None = None, times: Times | None = None) -> None:
        self.calls: list[Call] = []
        self.faults = Faults()
        self.on_call: Callable[[Call], None] | None = None
        """Called when a call has come, before anything is done about it."""
        self.on_done: Callable[[Call], None] | None = None
        """Called when a call was carried out, before it is answered."""
        self.spot: dict[tuple[str, str], float] = {}
        self.prices: dict[str, float] | None = dict(TABLE)
        """On-demand prices; None makes them a secret."""
        self.quotas: dict[str, float] = {"*": 64.0}
        """What Service Quotas says, by code; "*" is all others. Launches do not count them: let `fail` refuse those."""
        self.expired = False
        self._ec2 = Ec2(
            self._forward,
            self._zone_of,
            Machines(times or Times(), hooks),
            self._spot,
            self._demand,
            quotas=self.quotas,
        )
        self._lock = threading.RLock()
        self._notices: list[threading.Timer] = []
        self._server: Any = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Cloud:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begins to serve on a free port of this computer."""
        os.environ.setdefault("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
        try:
            from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
            from werkzeug.serving import WSGIRequestHandler, make_server
        except ImportError as exc:
            raise SkywardError('the test cloud needs moto. Run: pip install "moto[ec2,ssm,server]"') from exc

        class Quiet(WSGIRequestHandler):
            def log(self, type: str, message: str, *args: Any) -> None:
                """Calls are recorded, not printed."""

        self._moto: Any = DomainDispatcherApplication(create_backend_app)
        self._reset()
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True, name="test cloud")
        self._thread.start()

    def stop(self) -> None:
        """Ends serving; machines that are left are ended as well, so that no host of theirs stays."""
        self._drop_notices()
        for instance in list(self.machines.all.values()):
            self.machines.ended(instance.id)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        if self._thread is not None:
            self._thread.join(timeout=10)

    @property
    def endpoint(self) -> str:
        """Where it serves."""
        host, port = self._server.server_address[:2]
        return f"http://{host}:{port}"

    @property
    def environ(self) -> dict[str, str]:
        """A login that works here, for the environment of a client or of `sky ps` and `sky down`."""
        return {
            "AWS_ACCESS_KEY_ID": "AKIATESTTESTTESTTEST",
            "AWS_SECRET_ACCESS_KEY": "not-a-secret",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    @property
    def machines(self) -> Machines:
        """All machines that ever were."""
        return self._ec2.machines

    @property
    def times(self) -> Times:
        """How long things take."""
        return self.machines.times

    def aws(self, **settings: Any) -> AWS:
        """The provider that uses this cloud; patient for seconds, not for minutes."""
        known: dict[str, Any] = {"endpoint_url": self.endpoint, "ssh_from": "192.0.2.1/32", "pace": _QUICK}
        return AWS(**{**known, **settings})

    def fail(self, action: str, code: str = "InternalError", **how: Any) -> Fault:
        """Has calls fail; see `Fault`."""
        return self.faults.add(Fault(action, code, **how))

    def room(self, most: int, zone: str = "*", kind: str = "*", market: str = "*") -> None:
        """Limits how many machines there can be; `*` and `?` count. The limit set last counts."""
        self.machines.rooms.append((zone, kind, market, most))

    def reserve(self, kind: str, zone: str, count: int, block: bool = False, state: str = "active") -> str:
        """Reserves room for machines, as a capacity reservation or as a capacity block, and returns its id."""
        return self._ec2.reserved.add(kind, zone, count, block, state)

    def end(self, id: str, reason: str = "Server.SpotInstanceTermination") -> None:
        """Ends a machine from outside: reclaimed, or shut down by itself."""
        if self.machines.ended(id, reason):
            with self._lock:
                self._ec2.end(self.machines.all[id].region, [id])

    def notice(self, id: str, seconds: float = 120.0) -> None:
        """Tells a spot machine that it is taken away in so many seconds, and takes it away unless it ended before.

        How it is told is up to the hooks (see `NoticeHooks`); of several notices the earliest counts.
        """
        self.machines.noticed(id, time.time() + seconds)
        timer = threading.Timer(seconds, self.end, (id,))
        timer.daemon = True
        self._notices.append(timer)
        timer.start()

    def running(self) -> list[Instance]:
        """Machines that cost money."""
        return [instance for instance in self.machines.all.values() if instance.ended is None]

    def leftovers(self) -> list[str]:
        """All that is left of anything that was created, seen or not, from the cloud's own records."""
        left = [instance.id for instance in self.running()]
        left += [name for _, name in self._ec2.placements]
        left += [name for image in self._ec2.images.values() for name in (image.id, image.snapshot)]
        for backend in self._backends():
            left += list(backend.key_pairs)
            # moto makes up groups that are named but do not exist; what was created here carries tags
            left += [g.id for groups in backend.groups.values() for g in groups.values() if g.get_tags()]
            left += list(backend.volumes)
            left += list(getattr(backend, "launch_templates", {}))
        return left

    def connect_endpoint(self, vpc: str, group: str) -> None:
        """Gives a VPC an EC2 Instance Connect endpoint, in a security group."""
        self._ec2.endpoints.append((vpc, group))

    def ssh_sources(self, region: str, group: str) -> list[str]:
        """The addresses that a security group lets in to port 22."""
        from moto.ec2.models import ec2_backends

        found = ec2_backends[_ACCOUNT][region].get_security_group_from_id(group)
        rules = [rule.ip_range for rule in found.ingress_rules if str(rule.from_port) == "22"] if found else []
        return [str(one.get("CidrIp") or one.get("CidrIpv6")) for one in rules if one]

    def forget(self) -> None:
        """A new cloud at the same place: nothing exists, nothing is recorded, nothing goes wrong."""
        self._drop_notices()
        with self._lock:
            for instance in self.running():
                self.machines.ended(instance.id)
            kept = self._ec2.kept
            machines = Machines(Times(), self.machines.hooks)
            self._ec2 = Ec2(
                self._forward, self._zone_of, machines, self._spot, self._demand, quotas=self.quotas, kept=kept
            )
            self.calls.clear()
            self.faults.clear()
            self.on_call = self.on_done = None
            self.spot, self.prices, self.expired = {}, dict(TABLE), False
            self.quotas.clear()
            self.quotas["*"] = 64.0
            self._reset()

    def _drop_notices(self) -> None:
        """What was announced does not come any more; what is coming just now is waited for."""
        while self._notices:
            timer = self._notices.pop()
            timer.cancel()
            timer.join()

    # serving

    def _serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        request = parse(environ, body)
        call = self._recorded(request)
        if self.on_call is not None:
            self.on_call(call)
        fault = self.faults.due(call)
        if self.expired and request.service != "":
            answer = error(request.service, "ExpiredToken" if request.service == "sts" else "RequestExpired", "expired")
        elif fault is not None and fault.mode in ("refuse", "cut"):
            answer = error(request.service, fault.code, fault.message, fault.status)
        else:
            with self._lock:
                answer = self._ec2.answer(request)
            if self.on_done is not None:
                self.on_done(call)
        lost = fault is not None and fault.mode in ("lose", "cut")
        if fault is not None and fault.mode == "fail":
            answer = error(request.service, fault.code, fault.message, fault.status)
        elif fault is not None and fault.mode == "garble":
            answer = replace(answer, body=fault.garble(answer.body))
        with self._lock:
            self.calls[call.number] = replace(call, outcome="lost" if lost else answer.code)
        if lost:
            with suppress(OSError):
                environ["werkzeug.socket"].shutdown(2)
            raise ConnectionResetError("cut by the test")
        headers = [("Content-Type", answer.type), ("Content-Length", str(len(answer.body)))]
        start_response(f"{answer.status} {'OK' if answer.status < 300 else 'Error'}", headers)
        return [answer.body]

    def _recorded(self, request: Request) -> Call:
        with self._lock:
            number = len(self.calls)
            call = Call(number, request.service, request.action, request.region, dict(request.params), time.time())
            self.calls.append(call)
            return call

    def _forward(self, request: Request) -> Answer:
        from werkzeug.test import EnvironBuilder, run_wsgi_app

        scope = f"AKIA/20260101/{request.region}/{request.service}/aws4_request"
        builder = EnvironBuilder(
            method="POST",
            headers=[
                ("Authorization", f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=, Signature="),
                ("Host", f"{request.service}.{request.region}.amazonaws.com"),
            ],
            content_type="application/x-www-form-urlencoded",
            input_stream=io.BytesIO(request.body),
            content_length=len(request.body),
        )
        chunks, status, headers = run_wsgi_app(self._moto, builder.get_environ())
        return Answer(int(status.split()[0]), b"".join(chunks), headers.get("Content-Type", "text/xml"))

    def _backends(self) -> list[Any]:
        from moto.ec2.models import ec2_backends

        regions: Mapping[str, Any] = ec2_backends[_ACCOUNT]
        return list(regions.values())

    def _zone_of(self, region: str, subnet: str) -> str:
        from moto.ec2.models import ec2_backends

        return str(ec2_backends[_ACCOUNT][region].get_subnet(subnet).availability_zone)

    def _reset(self) -> None:
        for backend in self._backends():
            backend.reset()

    def _spot(self, kind: str, zone: str) -> float | None:
        given = self.spot.get((kind, zone))
        price = TABLE.get(kind)
        # cheaper than on-demand, and not the same everywhere
        return given if given is not None else None if price is None else price * (0.3 + 0.01 * (ord(zone[-1]) - 97))

    def _demand(self, kind: str, region: str) -> dict[str, float]:
        prices = self.prices or {}
        return {name: price for name, price in prices.items() if not kind or name == kind}
