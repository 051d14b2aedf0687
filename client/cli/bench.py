"""x"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any, Final

from railrelay.client import limit
from railrelay.client.cli import _node, _nodes, lanes
from railrelay.client.cli._bench_engines import Case, Receiver, Sender
from railrelay.client.cli._nodes import MIB, Node
from railrelay.client.cli._progress import Progress
from railrelay.client.cli._workers import Worker
from railrelay.client.client import Route
from railrelay.client.errors import ArgumentError, ErrorCode

_CALLS: Final = (1 * MIB, 4 * MIB, 8 * MIB, 16 * MIB)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=16384)
    parser.add_argument("--block-bytes", type=int, default=65536)
    parser.add_argument("--route", choices=["relay", "direct"], default="relay")
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--runs", type=int)
    parser.add_argument("--rails", type=int, default=1)
    parser.add_argument("--congestion", default="reno")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pin", default="")


def run(args: argparse.Namespace) -> int:
    progress = Progress()
    R = args.rails
    relay = args.route == "relay"
    case = Case(args.blocks, args.block_bytes, R, 1 % R if relay else 0, Route.RELAY_ALL if relay else Route.DIRECT, args.private, args.congestion)
    geometry = _nodes.fitting_geometry(R, 2 * R, R)
    send_cpu, recv_cpu, caller, feeder = (int(x) for x in args.pin.split(",")) if args.pin else (-1, -1, -1, -1)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="railrelay-bench-")))
        nodes = [
            stack.enter_context(Node(f"bench-{side}-{os.getpid()}", directory, geometry, [cpu] * R, args.congestion))
            for side, cpu in (("prefill", send_cpu), ("decode", recv_cpu))
        ]
        sender = stack.enter_context(Worker("sender", Sender, case, nodes[0].socket, [send_cpu] * R, caller, feeder))
        receiver = stack.enter_context(Worker("receiver", Receiver, case, nodes[1].socket, [recv_cpu] * R, -1, -1))
        receiver.result(); sender.result()
        sender.begin("fill")
        receiver.ask("wipe")
        sender.result()
        sender.ask("open", receiver.ask("offers"), receiver.ask("destinations"))
        port = receiver.ask("listen")
        receiver.begin("accept")
        sender.ask("connect", port)
        receiver.result()
        pids = [nodes[0].pid, nodes[1].pid, sender.pid, receiver.pid]
        def cpu(): return [limit.process_cpu_ns(p) / 1e9 for p in pids]
        def plain(call, rounds=1, gap=0):
            receiver.begin("plain_receive", call, rounds)
            a = cpu()
            spent, each = sender.ask("plain_send", call, rounds, gap)
            receiver.result()
            return spent / 1e9, each, [y - x for x, y in zip(a, cpu())]
        small = case.nbytes <= MIB
        rounds, gap = (200, 1_000_000) if small else (1, 0)
        def ours():
            a = cpu()
            each = sender.ask("transfer", rounds, gap)
            return each, [y - x for x, y in zip(a, cpu())]
        ours()
        print("wrong after ours", receiver.ask("check"))
        receiver.ask("wipe")
        best = {}
        for call in _CALLS if not small else (MIB,):
            best[call] = min(plain(call)[0] for _ in range(3))
        print("wrong after limit", receiver.ask("check"), {k//MIB: round(case.nbytes/v/1e9,2) for k,v in best.items()})
        call = min(best, key=best.get)
        pairs = []
        for i in range(args.runs or 11):
            l = plain(call, rounds, gap)
            o = ours()
            c = sender.ask("gather", geometry.slots, geometry.slot_bytes) / 1e9
            lt = statistics.median(l[1])/1e9; ot = statistics.median(o[0])/1e9
            pairs.append((lt, ot, sum(l[2])/rounds, sum(o[1])/rounds, c, o[1]))
            g = case.nbytes / 1e9
            if small: print(f"limit {lt*1e6:.1f} ours {ot*1e6:.1f} us ratio {ot/lt:.2f} ")
            else: print(f"limit {g/lt:.2f} ours {g/ot:.2f} ratio {lt/ot:.2f} cpu/GB {sum(l[2])/g:.3f} {sum(o[1])/g:.3f} x{sum(o[1])/sum(l[2]):.2f} copy {c/g:.3f} [sd rd se re] {[round(x/g,3) for x in o[1]]}")
        med = lambda f: statistics.median(f(p) for p in pairs)
        r = med(lambda p: p[0]/p[1]); lc = med(lambda p: p[2]); oc = med(lambda p: p[3]); cc = med(lambda p: p[4])
        print(f"RATIO {r:.3f} bound {lc/(lc+cc):.3f} ratio/bound {r/(lc/(lc+cc)):.3f}; cpu x{oc/lc:.2f} of limit, x{oc/(lc+cc):.2f} of limit+copy; GB/s limit {case.nbytes/1e9/med(lambda p:p[0]):.2f} ours {case.nbytes/1e9/med(lambda p:p[1]):.2f}; lat x{1/r:.2f}")
    return 0
