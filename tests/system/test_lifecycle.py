"""Daemons that start, refuse to start, drain, die and come back, and what the admin commands show of them."""

from __future__ import annotations

import contextlib
import grp
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers import memory, patterns, processes, sockets
from helpers.memory import Link
from helpers.nodes import SHM, SMALL, Node, Nodes, config_text, new_instance
from helpers.waiting import LIMIT_S, until

from railrelay.client import (
    Client,
    ConnectError,
    DaemonGone,
    ErrorCode,
    PeerError,
    Region,
    RelayError,
    Result,
    Transfer,
    TransferError,
    Unsettled,
    WaitTimeout,
)
from railrelay.shm_layout import abi

pytestmark = pytest.mark.system

BLOCKS, BLOCK = 1024, 16384
NBYTES = BLOCKS * BLOCK


def send(link: Link, seed: int = 1, timeout: float = 30.0) -> None:
    begin(link, seed, timeout).wait(30)
    assert patterns.arrived(link.source.array, link.destination.array, BLOCKS, BLOCK, seed)


def begin(link: Link, seed: int = 1, timeout: float = 30.0) -> Transfer:
    taken, put = patterns.order(BLOCKS, BLOCK, seed)
    return link.sender.write(
        link.remote,
        taken + np.uint64(link.source.address),
        put + np.uint64(link.remote.address),
        BLOCK,
        timeout=timeout,
    )


def filled(sender: Client, receiver: Client, **kinds: memory.Kind) -> Link:
    link = memory.link(sender, receiver, NBYTES, **kinds)
    link.source.array[:] = patterns.content(NBYTES, 1)
    return link


def moved(node: Node) -> int:
    """Bytes that its rails have taken from clients."""
    return sum(lane["bytes"] + lane["direct_bytes"] for lane in node.cli("lanes")["lanes"])


# ---- refusing to start ----


def test_a_configuration_without_rails_is_refused(nodes: Nodes) -> None:
    code, said = nodes.fails("rail = []")
    assert code == 2
    assert said.endswith("rail: 0: expected 1 to 16 [[rail]] sections")


def test_a_slot_smaller_than_a_cell_is_refused(nodes: Nodes) -> None:
    code, said = nodes.fails(config_text("x", "/tmp/x", 1, {"relay": {"slot_bytes": 65535}}))
    assert code == 2
    assert "relay.slot_bytes: 65535: expected 65536 to" in said


def test_a_misspelt_option_is_refused(nodes: Nodes) -> None:
    code, said = nodes.fails("[relay]\nslotz = 4")
    assert (code, said.endswith("relay.slotz: no such option")) == (2, True)


def test_a_rail_address_of_another_machine_is_refused(nodes: Nodes) -> None:
    trusted = {"security": {"allow_unauthenticated": True}}
    code, said = nodes.fails(config_text(new_instance(), nodes.directory / "x", ["203.0.113.1"], trusted))
    assert code == 1
    assert 'rail[0].address: "203.0.113.1" is no address of this machine, which has 127.0.0.1' in said


def test_a_port_that_is_taken_is_refused(nodes: Nodes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = config_text(new_instance(), nodes.directory / "x", 1, {"node": {"port": port}})
        code, said = nodes.fails(text)
    assert code == 1
    assert f"node.port: cannot listen on 127.0.0.1 port {port}" in said


def test_congestion_control_that_the_kernel_has_not_is_refused(nodes: Nodes) -> None:
    text = config_text(new_instance(), nodes.directory / "x", 1, {"tcp": {"congestion": "nonsense"}})
    code, said = nodes.fails(text)
    assert code == 1
    assert "tcp.congestion 'nonsense' is not available" in said


def test_a_second_daemon_of_the_same_instance_is_refused_and_harms_nothing(nodes: Nodes) -> None:
    node = nodes.start()
    with node.connect(0) as sender, node.connect(1) as receiver:
        link = filled(sender, receiver)
        text = config_text(node.instance, nodes.directory / "other.sock", 1, {})
        code, said = nodes.fails(text)
        assert code == 3
        assert f"instance '{node.instance}' is taken by railrelayd pid {node.pid}" in said
        send(link)


def test_of_daemons_that_start_at_once_under_one_name_one_runs(nodes: Nodes) -> None:
    instance = new_instance()
    running: list[processes.Process] = []
    for number in range(4):
        config = nodes.directory / f"{number}.toml"
        config.write_text(config_text(instance, nodes.directory / f"{number}.sock", 1, SMALL))
        log = nodes.directory / f"{number}.log"
        running.append(processes.start(["-m", "railrelay.daemon.main", "--config", str(config)], log=log))
    try:
        until(lambda: sum(process.poll() is not None for process in running) == 3, "three give up")
        assert sorted(process.returncode or 0 for process in running) == [0, 3, 3, 3]
        [number] = [number for number, process in enumerate(running) if process.returncode is None]
        until(lambda: (nodes.directory / f"{number}.sock").exists(), "the other serves")
        Client.connect(nodes.directory / f"{number}.sock", rank=0).close()
        running[number].send_signal(signal.SIGTERM)
        assert running[number].wait(30) == 0
    finally:
        for process in running:
            processes.end(process)
    assert not [name for name in os.listdir(SHM) if instance in name]


def test_a_second_daemon_on_the_same_socket_is_refused(nodes: Nodes) -> None:
    node = nodes.start()
    code, said = nodes.fails(config_text(new_instance(), node.socket, 1, {}))
    assert code == 3
    assert f"control socket {node.socket} is in use" in said
    node.connect(0).close()


def test_something_else_in_place_of_the_socket_is_not_removed(nodes: Nodes) -> None:
    path = nodes.directory / "precious"
    path.write_text("data")
    code, said = nodes.fails(config_text(new_instance(), path, 1, {}))
    assert code == 1
    assert f"control socket {path}: something else is there" in said
    assert path.read_text() == "data"


def test_no_memory_for_the_node_segment_says_how_much_is_wanted(nodes: Nodes) -> None:
    node = nodes.start(limits={"max_clients": 256})
    text = config_text(new_instance(), nodes.directory / "x", 1, {"limits": {"max_peers": 1024}})
    code, said = run_in_small_shm(nodes, text, "16k")
    assert code == 4
    assert "bytes of shared memory wanted" in said
    node.connect(0).close()


# ---- a full /dev/shm ----


def run_in_small_shm(nodes: Nodes, text: str, size: str) -> tuple[int, str]:
    """A daemon that must fail, where /dev/shm has ``size``."""
    config = nodes.directory / "small.toml"
    config.write_text(text)
    log = nodes.directory / "small.log"
    process = processes.start(
        ["-m", "railrelay.daemon.main", "--config", str(config)], log=log, prefix=small_shm(nodes.directory, size)
    )
    try:
        return process.wait(30), log.read_text().strip().splitlines()[-1]
    finally:
        processes.end(process)


def small_shm(directory: Path, size: str) -> Sequence[str]:
    """Prefix of a command that then sees a /dev/shm of its own; skips where that takes rights that we have not."""
    script = directory / "small-shm.sh"
    script.write_text(f'mount -t tmpfs -o size={size} none /dev/shm && exec "$@"\n')
    prefix = ["unshare", "--mount", "--map-root-user", "sh", str(script)]
    if os.geteuid() == 0:
        prefix.remove("--map-root-user")
    possible = shutil.which("unshare") and subprocess.run([*prefix, "true"], check=False).returncode == 0
    if not possible:
        pytest.skip("needs unshare and the right to mount a tmpfs")
    return prefix


def test_lanes_that_do_not_fit_into_shared_memory_are_refused_and_the_session_goes_on(nodes: Nodes) -> None:
    node = nodes.start(prefix=small_shm(nodes.directory, "6m"), relay={"slots": 64, "table_entries": 64})
    with node.connect(0, local=False) as sender, node.connect(1) as receiver:
        link = filled(sender, receiver, source="private")
        for _ in range(2):
            with pytest.raises(RelayError, match=rf"{64 * 262144} bytes of shared memory wanted, \d+ free") as failure:
                begin(link)
            assert failure.value.code is ErrorCode.NO_MEMORY
        shared = memory.make(sender, NBYTES)
        shared.array[:] = link.source.array
        assert isinstance(link.source.owner, Region)
        link.source.owner.unregister()
        sender.write(link.remote, [shared.address], [link.remote.address], NBYTES).wait(30)
        assert (link.destination.array == shared.array).all()
    assert "ERROR no_memory:" in node.log


def test_bounce_memory_that_does_not_fit_is_refused_and_the_session_goes_on(nodes: Nodes) -> None:
    node = nodes.start(prefix=small_shm(nodes.directory, "6m"), relay={"bounce_slots": 64, "table_entries": 64})
    with node.connect(0) as client:
        for _ in range(2):
            with pytest.raises(RelayError, match="bytes of shared memory wanted") as failure:
                client.register(np.zeros(65536, np.uint8))
            assert failure.value.code is ErrorCode.NO_MEMORY
        link = memory.link(client, client, 65536)
        link.source.array[:] = 3
        client.write(link.remote, [link.source.address], [link.remote.address], 65536).wait(30)
        assert link.destination.array.all()
        assert client.register(np.zeros(65536, np.uint8), receive=False).nbytes == 65536


def test_clients_whose_segment_does_not_fit_are_refused(nodes: Nodes) -> None:
    node = nodes.start(prefix=small_shm(nodes.directory, "6m"), relay={"slots": 64, "table_entries": 4096})
    for _ in range(3):
        with pytest.raises(ConnectError, match="bytes of shared memory wanted"):
            node.connect(0)


def test_slots_of_a_size_that_no_machine_has_fail_when_a_lane_is_wanted(nodes: Nodes) -> None:
    node = nodes.start(relay={"slots": 256, "slot_bytes": "1GiB", "table_entries": 16})
    with node.connect(0, local=False) as client:
        source = client.register(np.ones(4096, np.uint8), receive=False)
        to = memory.make(client, 4096)
        remote = client.open(to.offer())
        with pytest.raises(RelayError, match=f"{256 << 30} bytes of shared memory wanted"):
            client.write(remote, [source.address], [remote.address], 4096)
    assert not [name for name in node.objects() if ".lane." in name]


# ---- who may attach ----


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_and_members_of_the_group_are_not(nodes: Nodes) -> None:
    stranger, group = 65534, grp.getgrgid(os.getegid()).gr_name
    open_to_all = Path(tempfile.mkdtemp(prefix="railrelay-test-", dir="/tmp"))
    try:
        open_to_all.chmod(0o755)
        private = nodes.start(node={"socket": str(open_to_all / "private.sock")})
        shared = nodes.start(node={"socket": str(open_to_all / "shared.sock"), "group": group})

        def as_stranger(node: Node, gid: int) -> None:
            os.setgroups([])
            os.setgid(gid)
            os.setuid(stranger)
            node.connect(0).close()

        def refused(node: Node, gid: int) -> None:
            with pytest.raises(ConnectError, match="run as the daemon's user or join its group") as failure:
                as_stranger(node, gid)
            assert failure.value.code is ErrorCode.DENIED

        assert processes.exit_code(processes.fork(lambda: refused(private, stranger))) == 0
        assert processes.exit_code(processes.fork(lambda: refused(shared, stranger))) == 0
        assert processes.exit_code(processes.fork(lambda: as_stranger(shared, os.getegid()))) == 0
    finally:
        nodes.close()
        shutil.rmtree(open_to_all)


# ---- ending ----


def test_sigterm_leaves_nothing_in_shared_memory_and_no_socket(nodes: Nodes) -> None:
    node = nodes.start(4)
    with node.connect(0) as client:
        link = filled(client, client, source="private", destination="private")
        send(link)
        assert len(node.objects()) > 3
        assert node.terminate() == 0
        assert node.objects() == []
        assert not Path(node.socket).exists()
        with pytest.raises(DaemonGone, match="start railrelayd again"):
            begin(link)


def test_sigint_ends_a_daemon_cleanly_too(nodes: Nodes) -> None:
    node = nodes.start()
    os.kill(node.pid, 2)
    assert node.wait() == 0
    assert node.objects() == []


def test_a_service_manager_is_told_of_readiness_and_of_the_end(nodes: Nodes) -> None:
    path = nodes.directory / "notify.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(30)
        nodes.environment["NOTIFY_SOCKET"] = str(path)
        node = nodes.start()
        assert manager.recv(100) == b"READY=1"
        assert node.terminate() == 0
        assert manager.recv(100) == b"STOPPING=1"


def test_a_daemon_without_descriptors_refuses_clients_and_recovers(nodes: Nodes) -> None:
    node = nodes.start(prefix=["prlimit", "--nofile=48:48"])
    clients: list[Client] = []
    with contextlib.ExitStack() as stack:
        while (client := attached(node, len(clients))) is not None:
            clients.append(stack.enter_context(client))
        assert 2 < len(clients) < 48
    client = until(lambda: attached(node, 0), "it has descriptors again")
    assert client is not None
    client.close()
    assert "ERROR" in node.log


def attached(node: Node, rank: int) -> Client | None:
    """None: refused."""
    try:
        return node.connect(rank, timeout=2)
    except RelayError:
        return None


def test_a_draining_daemon_finishes_what_is_in_flight_and_admits_nothing(nodes: Nodes) -> None:
    prefill, decode = nodes.pair(timeouts={"drain_s": 20})
    with prefill.connect() as sender, decode.connect() as receiver:
        link = filled(sender, receiver)
        send(link)
        link.destination.array[:] = 0
        before = moved(prefill)
        decode.pause()
        transfer = begin(link, 2)
        until(lambda: moved(prefill) > before, "the daemon has it in flight")
        os.kill(prefill.pid, 15)
        until(lambda: sender.draining != "", "the client hears of it")
        with pytest.raises(ConnectError, match="going down") as failure:
            prefill.connect(1)
        assert failure.value.code is ErrorCode.DRAINING
        assert prefill.cli("lanes")["daemon"]["phase"] == "draining"
        assert not transfer.done
        decode.resume()
        transfer.wait(30)
        assert patterns.arrived(link.source.array, link.destination.array, BLOCKS, BLOCK, 2)
        assert prefill.wait() == 0
        assert prefill.objects() == []


def test_a_drain_that_takes_too_long_ends_anyway_and_says_what_was_left(nodes: Nodes) -> None:
    prefill, decode = nodes.pair(timeouts={"drain_s": 0.3})
    with prefill.connect() as sender, decode.connect() as receiver:
        link = filled(sender, receiver)
        send(link)
        with decode.paused():
            before = moved(prefill)
            transfer = begin(link, 2)
            until(lambda: moved(prefill) > before, "the daemon has it in flight")
            assert prefill.terminate() == 0
            assert "1 transfers were in flight after 0.3 s of draining" in prefill.log
            with pytest.raises(Unsettled) as failure:
                transfer.wait(30)
            assert failure.value.result is Result.DAEMON_GONE
    assert prefill.objects() == []


# ---- dying and coming back ----


def write_on(link: Link) -> None:
    """Until the client notices that its daemon is gone."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        begin(link)


def test_a_killed_daemon_comes_back_under_its_name_and_clears_up(nodes: Nodes) -> None:
    node = nodes.start(2)
    with node.connect(0) as client:
        link = filled(client, client, source="private", destination="private")
        send(link)
        node.kill()
        left = node.objects()
        assert any(".lane." in name for name in left)
        with pytest.raises(DaemonGone, match=f"daemon pid {node.pid} exited"):
            write_on(link)
        again = nodes.again(node)
        assert not [name for name in again.objects() if name.rsplit(".", 1)[1] not in ("lock", "node")]
    with again.connect(0) as sender, again.connect(1) as receiver:
        send(filled(sender, receiver, source="private"))


def test_what_clients_of_a_killed_daemon_hold_is_not_touched_by_its_successor(nodes: Nodes) -> None:
    node = nodes.start()
    with node.connect(0) as old:
        link = filled(old, old)
        node.kill()
        again = nodes.again(node)
        with again.connect(0) as sender, again.connect(1) as receiver:
            send(filled(sender, receiver))
        assert (link.source.array == patterns.content(NBYTES, 1)).all()
        with pytest.raises(DaemonGone):
            write_on(link)


def test_nothing_of_a_killed_sending_daemon_lands_after_an_abort(nodes: Nodes) -> None:
    """What it left in sockets and in the receiver is fenced before abort() returns."""
    prefill, decode = nodes.pair()
    with decode.connect() as receiver, prefill.connect() as sender:
        link = filled(sender, receiver)
        send(link)
        with decode.paused():
            transfer = begin(link, 2)
            with pytest.raises(WaitTimeout):
                transfer.wait(0.2)
            prefill.kill()
        receiver.receiver.abort("any request of that node")
        link.destination.array[:] = 0
        until(lambda: transfer.done, "the client notices")
        assert transfer.result is Result.DAEMON_GONE
        assert not transfer.settled
        again = nodes.again(prefill)
        with again.connect() as successor:
            send(filled(successor, receiver), 3)
        assert not link.destination.array.any()


def test_a_receiving_daemon_that_is_killed_and_restarted_on_its_port_is_another_instance(nodes: Nodes) -> None:
    prefill = nodes.start()
    decode = nodes.start(node={"port": sockets.free_port()})
    with prefill.connect() as sender:
        with decode.connect() as receiver:
            link = filled(sender, receiver)
            send(link)
            offer = link.destination.offer()
            decode.pause()
            transfer = begin(link, 2)
            with pytest.raises(WaitTimeout):
                transfer.wait(0.2)
            decode.kill()
        again = nodes.again(decode)
        assert again.session == decode.session
        with pytest.raises(TransferError) as failure:
            transfer.wait(30)
        assert failure.value.result is Result.PEER_LOST
        assert transfer.settled
        with pytest.raises((PeerError, ValueError)):
            begin(link)
        with pytest.raises(RelayError) as refusal:
            sender.open(offer)
        assert refusal.value.code in (ErrorCode.BAD_CAPABILITY, ErrorCode.PEER_LOST)
        with again.connect() as receiver:
            send(filled(sender, receiver), 3)
    assert any(error["code"] == "peer_lost" for error in prefill.errors())


def test_a_receiving_daemon_that_is_gone_for_good_leaves_transfers_unsettled_not_hanging(nodes: Nodes) -> None:
    prefill, decode = nodes.pair()
    with prefill.connect() as sender:
        with decode.connect() as receiver:
            link = filled(sender, receiver)
            send(link)
            decode.pause()
            transfer = begin(link, 2, timeout=0.5)
            decode.kill()
        with pytest.raises(TransferError) as failure:
            transfer.wait(30)
        assert failure.value.result in (Result.UNSETTLED, Result.PEER_LOST, Result.TIMED_OUT)
        with pytest.raises((PeerError, ValueError, TransferError)):
            begin(link, 3, timeout=0.5).wait(30)
        assert prefill.peer_states()[decode.session] == "lost"


@pytest.mark.parametrize("source", memory.KINDS)
def test_peers_that_are_gone_for_good_hold_nothing_that_others_need(nodes: Nodes, source: memory.Kind) -> None:
    """Neither slots of the lane nor places in the ring, though what they may still have is not settled."""
    prefill, *gone = (nodes.start() for _ in range(4))
    decode = gone.pop()
    with prefill.connect() as sender, decode.connect() as receiver:
        healthy = memory.link(sender, receiver, NBYTES, source=source)
        healthy.source.array[:] = patterns.content(NBYTES, 1)
        for node in gone:
            with node.connect() as other:
                remote = sender.open(memory.make(other, NBYTES).offer())
                offsets = np.arange(BLOCKS, dtype=np.uint64) * np.uint64(BLOCK)
                taken, put = offsets + np.uint64(healthy.source.address), offsets + np.uint64(remote.address)
                sender.write(remote, taken, put, BLOCK).wait(30)
                node.pause()
                transfers = [sender.write(remote, taken, put, BLOCK, timeout=0.3) for _ in range(20)]
                time.sleep(0.1)
                node.kill()
            for transfer in transfers:
                with pytest.raises(TransferError):
                    transfer.wait(30)
        for _ in range(3):
            send(healthy)


def test_a_control_connection_that_breaks_is_made_again_and_transfers_go_on(nodes: Nodes) -> None:
    """Silence longer than peer_s ends it; the same instance comes back."""
    prefill, decode = nodes.pair(timeouts={"peer_s": 0.5})
    with prefill.connect() as sender, decode.connect() as receiver:
        link = filled(sender, receiver, destination="private")
        send(link)
        with decode.paused():
            transfer = begin(link, 2)
            until(lambda: prefill.peer_states()[decode.session] == "lost", "the control connection ends")
        transfer.wait(30)
        assert patterns.arrived(link.source.array, link.destination.array, BLOCKS, BLOCK, 2)
        assert prefill.peer_states()[decode.session] == "connected"
        send(link, 3)


# ---- addresses ----


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="needs ::1")
def test_control_and_rails_work_over_ipv6(nodes: Nodes) -> None:
    prefill, decode = nodes.pair((["::1", "::1"], ["::1"]), node={"host": "::1"})
    assert decode.session.startswith("[::1]:")
    with prefill.connect(1) as sender, decode.connect() as receiver:
        send(filled(sender, receiver, source="private", destination="private"))
        assert prefill.peer_states() == {decode.session: "connected"}


def test_each_rail_uses_its_own_address(nodes: Nodes) -> None:
    prefill, decode = nodes.pair((["127.0.0.2", "127.0.0.3"], ["127.0.0.4", "127.0.0.5"]))
    with prefill.connect(0, route="relay") as sender, decode.connect(0) as receiver:
        source = memory.make(sender, 65536)
        for rail in range(2):
            to = memory.make(receiver, 65536, rail=rail)
            remote = sender.open(to.offer())
            sender.write(remote, [source.address], [remote.address], 65536).wait(30)
        assert {("127.0.0.2", "127.0.0.4"), ("127.0.0.3", "127.0.0.5")} <= connections()


def connections() -> set[tuple[str, str]]:
    """(local, remote) address of every IPv4 connection of this machine."""
    ends = [line.split()[1:3] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {(address(local), address(remote)) for local, remote in ends}


def address(end: str) -> str:
    return socket.inet_ntoa(bytes.fromhex(end.split(":")[0])[::-1])


def test_rails_of_the_same_identity_are_paired_whatever_their_order(nodes: Nodes) -> None:
    prefill, decode = start_named(nodes, "leaf-b", "leaf-a"), start_named(nodes, "leaf-a", "leaf-b")
    with prefill.connect(0) as sender, decode.connect(0) as receiver:
        source = memory.make(sender, 1 << 20)
        to = memory.make(receiver, 1 << 20, rail=0)
        remote = sender.open(to.offer())
        sender.write(remote, [source.address], [remote.address], 1 << 20).wait(30)
        carried = {lane["rail"]: lane["bytes"] + lane["direct_bytes"] for lane in prefill.cli("lanes")["lanes"]}
    assert carried == {1: 1 << 20}


def start_named(nodes: Nodes, *identities: str) -> Node:
    """A node whose rails have these identities."""
    instance = new_instance()
    config = nodes.directory / f"{instance}.toml"
    rails = [f'[[rail]]\naddress = "127.0.0.1"\nidentity = "{identity}"\n' for identity in identities]
    config.write_text(config_text(instance, nodes.directory / f"{instance}.sock", [], SMALL) + "".join(rails))
    return nodes.start_file(instance, config)


# ---- admin commands ----


def admin(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "railrelay.client.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_the_admin_commands_show_a_live_node(nodes: Nodes) -> None:
    prefill, decode = nodes.pair((2, 1))
    with prefill.connect(1, name="prefill-1") as sender, decode.connect(0, name="decode-0") as receiver:
        send(filled(sender, receiver, source="private"))
        [lane] = prefill.cli("lanes")["lanes"]
        assert (lane["rail"], lane["sender"], lane["pid"], lane["name"]) == (0, 1, os.getpid(), "prefill-1")
        assert lane["head"] == lane["doorbell"] == lane["completed"] > 0
        assert lane["credit"] == lane["slots"] == 4
        assert lane["bytes"] == NBYTES
        assert lane["blocks"] == BLOCKS
        [client] = prefill.cli("clients")["clients"]
        assert (client["pid"], client["rank"], client["name"]) == (os.getpid(), 1, "prefill-1")
        assert prefill.peer_states() == {decode.session: "connected"}
        assert prefill.errors() == []
        for verb in ("lanes", "clients", "peers", "errors"):
            shown = admin(verb, "--instance", prefill.instance)
            assert (shown.returncode, shown.stderr) == (0, "")


def test_the_admin_commands_still_show_a_dead_node(nodes: Nodes) -> None:
    prefill, decode = nodes.pair()
    with prefill.connect(name="prefill") as sender, decode.connect() as receiver:
        send(filled(sender, receiver, source="private"))
        with pytest.raises(PeerError):
            sender.peer("127.0.0.1:1", timeout=0.1)
        prefill.kill()
        shown = prefill.cli("lanes")
        assert shown["daemon"]["alive"] is False
        assert shown["lanes"][0]["bytes"] == NBYTES
        assert prefill.cli("clients")["clients"][0]["name"] == "prefill"
        assert decode.session in {peer["session"] for peer in prefill.cli("peers")["peers"]}
        said = admin("lanes", "--instance", prefill.instance)
        assert said.returncode == 0
        assert f"daemon pid {prefill.pid} is gone" in said.stderr


def test_the_admin_commands_name_the_instances_there_are(nodes: Nodes) -> None:
    node = nodes.start()
    said = admin("lanes", "--instance", "nobody")
    assert said.returncode == 3
    assert node.instance in said.stderr
    assert admin("lanes", "--instance", "../x").returncode == 1


def test_a_node_segment_of_another_major_version_is_named_with_ours(nodes: Nodes) -> None:
    node = nodes.start()
    version = abi.FIELDS["segment_header"]["version"].offset
    with (SHM / f"railrelay.{node.instance}.node").open("r+b") as raw:
        raw.seek(version)
        raw.write((7 << 16).to_bytes(4, "little"))
    said = admin("lanes", "--instance", node.instance)
    assert said.returncode == 1
    assert "7, this program reads 1; install the same railrelay version" in said.stderr


def test_the_command_railrelayd_checks_and_prints_configurations(nodes: Nodes) -> None:
    example = subprocess.run(
        [sys.executable, "-m", "railrelay.daemon.main", "--print-example"], capture_output=True, text=True, check=True
    ).stdout
    path = nodes.directory / "example.toml"
    path.write_text(example)
    good = subprocess.run(
        [sys.executable, "-m", "railrelay.daemon.main", "--check", "--config", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (good.returncode, f"{path}: good" in good.stderr) == (0, True)


@pytest.mark.parametrize("what", ["open", "peer"])
def test_who_waits_for_an_answer_hears_that_the_daemon_has_gone(nodes: Nodes, what: str) -> None:
    prefill, decode = nodes.pair()
    with prefill.connect(reattach=False) as client, decode.connect() as other, ThreadPoolExecutor(1) as pool:
        first, second = (other.alloc(4096).offer() for _ in range(2))
        client.open(first)
        waits: dict[str, Callable[[], object]] = {
            "open": lambda: client.open(second, 20),
            "peer": lambda: client.peer("127.0.0.1:9", 20),
        }
        with decode.paused():
            waiting = pool.submit(waits[what])
            with pytest.raises(TimeoutError):
                waiting.result(0.5)
            prefill.terminate()
            with pytest.raises(DaemonGone):
                waiting.result(20)
