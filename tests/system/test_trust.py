"""Who may connect to a daemon from other nodes: those that have its secret or a certificate, and nobody else, whatever
they say or repeat."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import pytest
from helpers import memory, patterns, rail_devices, sockets
from helpers.certificates import Authority
from helpers.nodes import Node, Nodes, config_text, new_instance
from helpers.raw_peer import FACTS, RawPeer, Refused, new_secret
from helpers.waiting import until

from railrelay.client import ErrorCode, PeerError, RegionError, Result, Transfer, TransferError, protocol
from railrelay.daemon import authentication, checks, config
from railrelay.daemon.authentication import CONNECTING
from railrelay.shm_layout import abi, segment

pytestmark = pytest.mark.system

BLOCKS, BLOCK = 64, 16384
NBYTES = BLOCKS * BLOCK

Options = dict[str, object]


def secret_file(directory: Path, content: bytes) -> str:
    path = directory / f"secret-{len(list(directory.iterdir()))}"
    path.touch(0o600)
    path.write_bytes(content + b"\n")
    return str(path)


@pytest.fixture
def secret() -> bytes:
    return new_secret()


@pytest.fixture
def known(tmp_path: Path, secret: bytes) -> Options:
    """The [security] section of a daemon that has the secret."""
    return {"secret_files": [secret_file(tmp_path, secret)]}


def sends(prefill: Node, decode: Node) -> None:
    with prefill.connect(0) as sender, decode.connect(0) as receiver:
        link = memory.link(sender, receiver, NBYTES)
        link.source.array[:] = patterns.content(NBYTES, 1)
        taken, put = patterns.order(BLOCKS, BLOCK, 1)
        sender.write(
            link.remote, taken + np.uint64(link.source.address), put + np.uint64(link.remote.address), BLOCK
        ).wait(30)
        assert patterns.arrived(link.source.array, link.destination.array, BLOCKS, BLOCK, 1)


def is_refused(prefill: Node, decode: Node, match: str) -> None:
    """Both ends say that they could not authenticate, and the engine is told."""
    with prefill.connect(0) as sender, pytest.raises(PeerError, match=match) as failure:
        sender.peer(decode.session, timeout=3)
    assert failure.value.code is ErrorCode.UNAUTHENTICATED
    for node in (prefill, decode):
        until(lambda node=node: unauthenticated(node), f"{node.instance} has recorded it")  # type: ignore[misc]


def unauthenticated(node: Node) -> list[str]:
    return [error["text"] for error in node.errors() if error["code"] == "unauthenticated"]


def says(node: Node, text: str) -> None:
    """A thread of its own writes the log."""
    until(lambda: text in node.log, f"{node.instance} logs {text!r}")


# ---- the secret ----


@rail_devices.every_nic()
def test_daemons_with_the_same_secret_send_to_each_other(nodes: Nodes, known: Options) -> None:
    prefill, decode = nodes.pair((2, 2), security=known)
    says(prefill, "peers authenticate by 1 secret")
    sends(prefill, decode)
    sends(decode, prefill)
    assert unauthenticated(prefill) == unauthenticated(decode) == []


def test_sealed_control_connections_are_made_again_and_transfers_go_on(nodes: Nodes, known: Options) -> None:
    prefill, decode = nodes.pair(security=known)
    with prefill.connect(0) as sender, decode.connect(0) as receiver:
        link = memory.link(sender, receiver, NBYTES)
        for _ in range(3):
            sender.write(link.remote, [link.source.address], [link.remote.address], NBYTES, notify=b"x").wait(30)
            sockets.cut(prefill, decode, control=True)


@pytest.mark.parametrize("lacks", ["prefill", "decode"])
def test_a_daemon_without_the_secret_is_refused_by_name_at_both_ends(nodes: Nodes, known: Options, lacks: str) -> None:
    prefill = nodes.start(security={} if lacks == "prefill" else known)
    decode = nodes.start(security={} if lacks == "decode" else known)
    is_refused(prefill, decode, r"set (the same )?security\.secret_files")


def test_a_daemon_with_another_secret_is_refused_by_name_at_both_ends(
    nodes: Nodes, known: Options, tmp_path: Path
) -> None:
    prefill = nodes.start(security={"secret_files": [secret_file(tmp_path, new_secret())]})
    decode = nodes.start(security=known)
    is_refused(prefill, decode, "none of the 1 secrets")
    is_refused(decode, prefill, "none of the 1 secrets")


def test_a_secret_is_replaced_while_daemons_run(nodes: Nodes, tmp_path: Path, secret: bytes) -> None:
    """Old everywhere; old and new; new everywhere: a pair of which one is a step ahead works all the time."""
    fresh, files = new_secret(), [tmp_path / "one", tmp_path / "two"]
    for path in files:
        path.touch(0o600)

    def write(prefill: tuple[bytes, bytes], decode: tuple[bytes, bytes]) -> None:
        for node, contents in ((ahead, prefill), (behind, decode)):
            for path, content in zip(node, contents, strict=True):
                path.write_bytes(content)

    ahead, behind = [[tmp_path / f"{end}-{number}" for number in range(2)] for end in ("ahead", "behind")]
    for path in (*ahead, *behind):
        path.touch(0o600)
    write((secret, secret), (secret, secret))
    prefill = nodes.start(security={"secret_files": list(map(str, ahead))})
    decode = nodes.start(security={"secret_files": list(map(str, behind))})
    for step in (
        ((secret, fresh), (secret, secret)),
        ((secret, fresh), (secret, fresh)),
        ((fresh, fresh), (secret, fresh)),
        ((fresh, fresh), (fresh, fresh)),
    ):
        write(*step)
        sends(prefill, decode)
        sends(decode, prefill)
    assert unauthenticated(prefill) == unauthenticated(decode) == []
    with RawPeer.dial(decode.session) as old, pytest.raises(Refused, match="none of the 2 secrets"):
        old.greet(secret)


def test_transfers_outlast_a_refusal_while_a_secret_is_replaced(nodes: Nodes, tmp_path: Path, secret: bytes) -> None:
    """Who is refused learns nothing of what it has sent."""
    own = Path(secret_file(tmp_path, secret))
    prefill = nodes.start(security={"secret_files": [str(own)]})
    decode = nodes.start(security={"secret_files": [secret_file(tmp_path, secret)]})
    with prefill.connect(0) as sender, decode.connect(0) as receiver:
        link = memory.link(sender, receiver, NBYTES)

        def send() -> Transfer:
            return sender.write(link.remote, [link.source.address], [link.remote.address], NBYTES, timeout=60)

        send().wait(30)
        own.write_bytes(new_secret())
        sockets.cut(prefill, decode, control=True)
        transfer = send()
        until(lambda: unauthenticated(prefill), "it is refused")
        assert not transfer.done
        own.write_bytes(secret)
        transfer.wait(30)


def test_a_daemon_with_a_secret_that_restarts_says_that_it_has_ended_the_sessions(nodes: Nodes, known: Options) -> None:
    port = sockets.free_port()
    prefill, decode = nodes.start(security=known), nodes.start(security=known, node={"port": port})
    with prefill.connect(0) as sender:
        with decode.connect(0, reattach=False) as receiver:
            link = memory.link(sender, receiver, NBYTES)
            decode.kill()
        transfer = sender.write(link.remote, [link.source.address], [link.remote.address], NBYTES, timeout=60)
        nodes.start(security=known, node={"port": port})
        with pytest.raises(TransferError) as failure:
            transfer.wait(30)
        assert failure.value.result is Result.PEER_LOST


def test_a_secret_that_others_may_read_stops_the_start_and_later_every_handshake(
    nodes: Nodes, known: Options, secret: bytes
) -> None:
    [path] = map(Path, known["secret_files"])  # type: ignore[call-overload]
    node = nodes.start(security=known)
    with RawPeer.dial(node.session) as peer:
        peer.greet(secret)
    path.chmod(0o644)
    instance = new_instance()
    code, last = nodes.fails(config_text(instance, nodes.directory / instance, 1, {"security": known}))
    assert code == 2
    assert "mode 0644; others must not read it: `chmod 600" in last
    with RawPeer.dial(node.session) as peer, pytest.raises(Refused, match="mode 0644") as failure:
        peer.greet(secret)
    assert failure.value.code == "unauthenticated"
    path.chmod(0o600)
    with RawPeer.dial(node.session) as peer:
        peer.greet(secret)


# ---- strangers ----


@pytest.fixture
def guarded(nodes: Nodes, known: Options) -> Iterator[Node]:
    """A daemon with the secret."""
    node = nodes.start(security=known)
    yield node
    with node.connect(0):
        pass


def test_nothing_is_answered_before_the_secret_is_shown(guarded: Node, secret: bytes) -> None:
    requests: list[Callable[[RawPeer], protocol.PeerMessage]] = [
        lambda peer: protocol.PeerOpenRegion(peer.new_id(), bytes(16)),
        lambda peer: protocol.RailConnect(peer.new_id(), 0, 0, False, 1),
        lambda peer: protocol.FenceRail(peer.new_id(), 1),
        lambda peer: protocol.PeerNote(peer.new_id(), 0, 1, b""),
        lambda peer: protocol.Ping(peer.new_id()),
        lambda peer: protocol.PeerDone(peer.new_id()),
        lambda peer: protocol.Look(peer.new_id(), []),
        lambda peer: protocol.Hello(peer.new_id(), peer.session, 0, FACTS, []),
    ]
    for make in requests:
        for opened in (False, True):
            with RawPeer.dial(guarded.session) as peer:
                if opened:
                    peer.open()
                peer.send(make(peer))
                answer = peer.receive()
                assert answer is None or isinstance(answer, protocol.Refused), answer
                assert peer.hears_the_end()
    with RawPeer.dial(guarded.session) as peer:
        peer.greet(secret)


def test_what_was_heard_of_a_handshake_is_of_no_use_in_another(guarded: Node, secret: bytes) -> None:
    with RawPeer.dial(guarded.session) as peer:
        opening, challenge = peer.open()
        bare = peer.hello()
        heard = msgspec.structs.replace(
            bare, proofs=authentication.proofs([secret], CONNECTING, (opening, challenge, bare))
        )
        welcome = peer.ask(heard, protocol.Welcome)
    with RawPeer.dial(guarded.session) as thief:
        again = thief.ask(opening, protocol.Challenge)
        assert again.nonce != challenge.nonce
        with pytest.raises(Refused, match="none of the 1 secrets") as failure:
            thief.ask(heard, protocol.Welcome)
        assert failure.value.code == "unauthenticated"
        assert thief.hears_the_end()
    with RawPeer.dial(guarded.session) as thief:  # what the accepting end proved shows nothing for a connecting one
        opening, challenge = thief.open()
        with pytest.raises(Refused, match="none of the 1 secrets"):
            thief.ask(msgspec.structs.replace(bare, proofs=[welcome.proof]), protocol.Welcome)


def test_a_second_try_needs_a_new_challenge(guarded: Node, secret: bytes) -> None:
    with RawPeer.dial(guarded.session) as peer:
        opening, challenge = peer.open()
        wrong, bare = peer.hello([bytes(32)]), peer.hello()
        good = msgspec.structs.replace(
            bare, proofs=authentication.proofs([secret], CONNECTING, (opening, challenge, bare))
        )
        peer.stream.sendall(peer.packet(wrong) + peer.packet(good))
        assert isinstance(peer.receive(), protocol.Refused)
        assert peer.receive() is None


def test_after_the_handshake_packets_without_a_seal_end_the_connection(guarded: Node, secret: bytes) -> None:
    for forge in (
        lambda packet: packet[:-1] + bytes([packet[-1] ^ 1]),
        lambda packet: packet * 2,
        lambda _: protocol.LENGTH_PREFIX.pack(0),
        lambda _: protocol.LENGTH_PREFIX.pack(len(PING)) + PING,
    ):
        with RawPeer.dial(guarded.session) as peer:
            peer.greet(secret)
            peer.ask(protocol.Ping(peer.new_id()), protocol.PeerDone)
            peer.stream.sendall(forge(peer.packet(protocol.Ping(peer.new_id()))))
            assert peer.hears_the_end()


PING = protocol.encode(protocol.Ping(9))


def rail_port(node: Node) -> int:
    with segment.open_segment(f"/railrelay.{node.instance}.node") as opened:
        return opened.area(abi.CONSTANTS["AREA_RAILS"], "rail_state").get(0, "port")


def closes(node: Node, preamble: bytes) -> bool:
    with socket.create_connection(("127.0.0.1", rail_port(node))) as rail:
        rail.settimeout(20)
        rail.sendall(preamble)
        with contextlib.suppress(ConnectionResetError):
            return rail.recv(1) == b""
        return True


def test_a_rail_admits_one_connection_for_what_only_its_session_can_show(guarded: Node, secret: bytes) -> None:
    def preamble(connection: int, shown: bytes, rail: int = 0) -> bytes:
        return protocol.RAIL_PREAMBLE.pack(protocol.RAIL_MAGIC, protocol.RAIL_VERSION, rail, connection, shown)

    with RawPeer.dial(guarded.session) as peer, RawPeer.dial(guarded.session, instance=8) as other:
        peer.greet(secret)
        other.greet(secret)
        token = peer.ask(protocol.RailConnect(peer.new_id(), 0, 0, False, 1), protocol.RailToken)
        assert token.token not in (b"", bytes(16))
        shown = authentication.shown_token(peer.keys, token.token, token.connection, 0)
        for stolen in (
            token.token,  # as it was said on the control connection
            authentication.shown_token(other.keys, token.token, token.connection, 0),
            authentication.shown_token(peer.keys, token.token, token.connection, 1),
        ):
            assert closes(guarded, preamble(token.connection, stolen))
        assert closes(guarded, preamble(token.connection, shown, rail=1))
        with socket.create_connection(("127.0.0.1", rail_port(guarded))) as rail:
            rail.settimeout(20)
            rail.sendall(preamble(token.connection, shown))
            assert closes(guarded, preamble(token.connection, shown))  # a second time
            fenced = peer.ask(protocol.FenceRail(peer.new_id(), token.connection), protocol.RailFenced)
            assert fenced.placed == 0
            assert rail.recv(1) == b""
        with pytest.raises(Refused, match="has no connection"):
            other.ask(protocol.FenceRail(other.new_id(), token.connection), protocol.RailFenced)


def test_a_token_ends_with_its_control_connection(guarded: Node, secret: bytes) -> None:
    with RawPeer.dial(guarded.session) as peer:
        peer.greet(secret)
        token = peer.ask(protocol.RailConnect(peer.new_id(), 0, 0, False, 1), protocol.RailToken)
        shown = authentication.shown_token(peer.keys, token.token, token.connection, 0)
    until(lambda: "control connection ended" in guarded.log, "the daemon has seen the end")
    preamble = protocol.RAIL_PREAMBLE.pack(protocol.RAIL_MAGIC, protocol.RAIL_VERSION, 0, token.connection, shown)
    assert closes(guarded, preamble)


# ---- daemons that accept and are not what they seem ----


@contextlib.contextmanager
def impostor(answer: Callable[[protocol.PeerMessage], list[protocol.PeerMessage]]) -> Iterator[str]:
    """Its session. Each connection is answered by hand."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)

        def serve() -> None:
            while not stop.is_set():
                with contextlib.suppress(TimeoutError, ConnectionError):
                    stream, _ = listener.accept()
                    with RawPeer(stream) as peer:
                        while (message := peer.receive()) is not None:
                            for said in answer(message):
                                peer.send(said)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield protocol.format_session(*listener.getsockname())
        finally:
            stop.set()
            thread.join()


def test_a_daemon_that_accepts_everybody_is_not_taken_for_one_with_the_secret(guarded: Node) -> None:
    """Downgrade: it says that all is well without a proof, or with one that it was given."""
    seen: list[bytes] = []

    def welcoming(message: protocol.PeerMessage) -> list[protocol.PeerMessage]:
        if isinstance(message, protocol.Opening):
            return [protocol.Challenge(message.id, protocol.PROTOCOL_VERSION, 5, bytes(32))]
        if isinstance(message, protocol.Hello):
            seen.extend(message.proofs)
            proof = b"" if len(seen) == 1 else message.proofs[0]
            return [protocol.Welcome(message.id, 0, FACTS, proof), protocol.PeerAbort(77, 5, [], 0, 1)]
        raise AssertionError(f"it went on with {message}")

    with impostor(welcoming) as session, guarded.connect(0) as client:
        for _ in range(2):
            with pytest.raises(PeerError, match="does not prove that it has the secret") as failure:
                client.peer(session, timeout=5)
            assert failure.value.code is ErrorCode.UNAUTHENTICATED
    assert len(set(seen)) == 2
    assert unauthenticated(guarded)


def test_a_daemon_in_the_middle_can_pass_the_handshake_on_and_nothing_else(nodes: Nodes, known: Options) -> None:
    """Who lures a daemon into dialling it can relay the handshake to the one it wants to be taken for. It hears what is
    said, but cannot say anything itself."""
    prefill, decode = nodes.pair(security=known)
    inject = protocol.LENGTH_PREFIX.pack(len(OPEN)) + OPEN
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def relay() -> None:
            near, _ = listener.accept()
            far = socket.create_connection(protocol.parse_session(decode.session))
            pumps = [threading.Thread(target=pump, args=ends) for ends in ((near, far), (far, near))]
            for one in pumps:
                one.start()
            stop.wait()
            with contextlib.suppress(OSError):
                far.sendall(inject)
            for one in pumps:
                one.join()
            near.close()
            far.close()

        middle = threading.Thread(target=relay)
        middle.start()
        try:
            with prefill.connect(0) as sender:
                sender.peer(protocol.format_session(*listener.getsockname()), timeout=5)
                listener.close()  # no second time
                stop.set()
                until(lambda: any("not sealed" in error["text"] for error in decode.errors()), "the injection is seen")
        finally:
            stop.set()
            middle.join()


OPEN = protocol.encode(protocol.PeerOpenRegion(99, bytes(16)))


def pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


# ---- TLS ----


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path / "authority")


@pytest.mark.parametrize("with_secret", [False, True])
def test_daemons_with_certificates_send_to_each_other_over_tls(
    nodes: Nodes, authority: Authority, known: Options, with_secret: bool
) -> None:
    own = {**authority.section("127.0.0.1"), **(known if with_secret else {})}
    prefill, decode = nodes.pair((2, 2), security=own)
    says(prefill, f"peers authenticate by {'1 secret and TLS' if with_secret else 'TLS'}")
    sends(prefill, decode)
    sends(decode, prefill)
    with prefill.connect(0) as sender, decode.connect(0) as receiver:
        link = memory.link(sender, receiver, NBYTES)
        for _ in range(3):
            sender.write(link.remote, [link.source.address], [link.remote.address], NBYTES).wait(30)
            sockets.cut(prefill, decode, control=True)


def test_a_certificate_of_another_authority_is_refused_at_both_ends(
    nodes: Nodes, authority: Authority, tmp_path: Path
) -> None:
    foreign = Authority.make(tmp_path / "foreign")
    prefill = nodes.start(security=foreign.section("127.0.0.1"))
    decode = nodes.start(security=authority.section("127.0.0.1"))
    is_refused(prefill, decode, "its certificate: ")
    trusting = nodes.start(security=foreign.section("127.0.0.1", ca=authority.directory / "ca.pem"))
    is_refused(trusting, decode, "TLS handshake; does security.tls_ca there know")


def test_a_certificate_for_another_host_is_refused(nodes: Nodes, authority: Authority) -> None:
    prefill = nodes.start(security=authority.section("127.0.0.1"))
    decode = nodes.start(security=authority.section("127.0.0.2"))
    with prefill.connect(0) as sender, pytest.raises(PeerError, match="its certificate: IP address mismatch") as wrong:
        sender.peer(decode.session, timeout=3)
    assert wrong.value.code is ErrorCode.UNAUTHENTICATED
    is_refused(decode, prefill, r"is for 127\.0\.0\.2, not for 127\.0\.0\.1 of its session")


@pytest.mark.parametrize("lacks", ["prefill", "decode"])
def test_a_daemon_without_tls_is_refused_by_name(nodes: Nodes, authority: Authority, lacks: str) -> None:
    prefill = nodes.start(security={} if lacks == "prefill" else authority.section("127.0.0.1"))
    decode = nodes.start(security={} if lacks == "decode" else authority.section("127.0.0.1"))
    is_refused(prefill, decode, "TLS")


def test_who_has_no_certificate_gets_no_answer_over_tls(nodes: Nodes, authority: Authority) -> None:
    node = nodes.start(security=authority.section("127.0.0.1"))
    with pytest.raises((ssl.SSLError, ConnectionError)), RawPeer.dial(node.session, tls=authority.connecting()) as peer:
        peer.open()
    until(lambda: unauthenticated(node), "the daemon has recorded it")
    with RawPeer.dial(node.session, tls=authority.connecting("127.0.0.1")) as peer:
        peer.greet()


def test_the_accepting_end_says_why_there_is_no_tls(nodes: Nodes, authority: Authority, tmp_path: Path) -> None:
    """Each reason has its own record, however often it comes."""
    node = nodes.start(security=authority.section("127.0.0.1"))
    foreign = Authority.make(tmp_path / "foreign")
    old = nodes.start(security=authority.section("127.0.0.1", left=timedelta(days=-1)))
    unknown = nodes.start(security=foreign.section("127.0.0.1", ca=authority.directory / "ca.pem"))
    suspicious = nodes.start(security=authority.section("127.0.0.1", ca=foreign.directory / "ca.pem"))
    plain = nodes.start()
    for peer in (old, unknown, suspicious, plain):
        with peer.connect(0) as sender, pytest.raises(PeerError):
            sender.peer(node.session, timeout=3)
    reasons = [
        "its certificate: certificate has expired",
        "its certificate: unable to get local issuer certificate",
        "it ended the connection; perhaps its security.tls_ca does not know the certificate of this node",
        "the peer at 127.0.0.1 connects without TLS; set security.tls_certificate, tls_key and tls_ca there",
    ]
    for reason in reasons:
        until(lambda reason=reason: any(reason in text for text in unauthenticated(node)), reason)  # type: ignore[misc]
        says(node, reason)


def test_alerts_that_a_stranger_makes_up_share_a_record(nodes: Nodes, authority: Authority) -> None:
    node = nodes.start(security=authority.section("127.0.0.1"))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        authority.connecting("127.0.0.1").wrap_bio(incoming, outgoing, server_hostname="127.0.0.1").do_handshake()
    hello = outgoing.read()
    for alert in (40, 42, 47, 48, 80, 112):
        with socket.create_connection(protocol.parse_session(node.session)) as stranger:
            stranger.sendall(hello)
            assert stranger.recv(65536)
            stranger.sendall(bytes([21, 3, 3, 0, 2, 2, alert]))
            while stranger.recv(65536):
                pass
    until(lambda: [error["count"] for error in node.errors()] == [6], "one record counts them all")


def test_who_speaks_something_else_is_told_of_tls_in_the_log(nodes: Nodes, authority: Authority) -> None:
    node = nodes.start(security=authority.section("127.0.0.1"))
    host, port = protocol.parse_session(node.session)
    with socket.create_connection((host, port)) as browser:
        browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert browser.recv(1) == b""
    says(node, "at most 16384, without TLS, which is configured here (security.tls_ca)")


def replaced(section: Options, by: Options) -> None:
    """The files of one section by those of another, one after the other."""
    for option in ("tls_ca", "tls_certificate", "tls_key"):
        new = Path(f"{section[option]}.new")
        shutil.copy2(str(by[option]), new)
        new.rename(str(section[option]))


def test_certificates_are_replaced_while_daemons_run(nodes: Nodes, authority: Authority, tmp_path: Path) -> None:
    own = authority.section("127.0.0.1", left=timedelta(days=3))
    prefill, decode = nodes.start(security=own), nodes.start(security=own)
    sends(prefill, decode)
    foreign = Authority.make(tmp_path / "foreign")
    with RawPeer.dial(decode.session, tls=authority.connecting("127.0.0.1")) as peer:
        peer.greet()
    replaced(own, foreign.section("127.0.0.1"))
    with RawPeer.dial(decode.session, tls=foreign.connecting("127.0.0.1")) as peer:
        peer.greet()
    with (
        pytest.raises((ssl.SSLError, ConnectionError)),
        RawPeer.dial(decode.session, tls=authority.connecting("127.0.0.1")) as peer,
    ):
        peer.open()
    sockets.cut(prefill, decode, control=True)
    sends(prefill, decode)
    sends(decode, prefill)
    says(decode, "TLS: certificate, key and CA were read again; security.tls_certificate: ")


def test_files_that_do_not_go_together_leave_what_was_read_before(nodes: Nodes, authority: Authority) -> None:
    own = authority.section("127.0.0.1")
    node = nodes.start(security=own)
    Path(str(own["tls_key"])).write_text("half a key")
    for _ in range(3):
        with RawPeer.dial(node.session, tls=authority.connecting("127.0.0.1")) as peer:
            peer.greet()
    [text] = unauthenticated(node)
    assert text.startswith("security.tls_certificate, tls_key, tls_ca: ")
    assert text.endswith("TLS goes on with what was read before")


@pytest.mark.parametrize(("days", "result", "said"), [(6, "warn", "expires in 6.0 d"), (-1, "fail", "has expired on")])
def test_a_certificate_that_expires_is_noticed(
    nodes: Nodes, authority: Authority, days: int, result: str, said: str
) -> None:
    own = authority.section("127.0.0.1", left=timedelta(days=days, minutes=10))
    node = nodes.start(security=own)
    expected = f"security.tls_certificate: {own['tls_certificate']}: {said}"
    says(node, expected)
    assert any(text.startswith(expected) for text in unauthenticated(node))
    found = checks.security(checks.Node(config.load(node.config_path)))
    assert (found.result, expected in found.seen) == (result, True)
    assert "put a new one in its place" in found.todo


# ---- where a daemon listens, and what says so ----


def test_a_daemon_without_a_secret_says_that_it_listens_on_loopback_only(nodes: Nodes) -> None:
    node = nodes.start()
    says(node, "no security.secret_files: loopback only")
    instance = new_instance()
    options: dict[str, Options] = {"node": {"host": "192.0.2.1"}}
    code, last = nodes.fails(config_text(instance, nodes.directory / instance, 1, options))
    assert code == 2
    assert 'node.host: "192.0.2.1": expected a loopback address' in last
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return
    if not str(address).startswith("127."):
        code, last = nodes.fails(config_text(instance, nodes.directory / instance, 1, {"node": {"host": name}}))
        assert code == 2
        assert "expected a loopback address" in last


def test_a_daemon_that_lets_everybody_in_says_so(nodes: Nodes) -> None:
    node = nodes.start(security={"allow_unauthenticated": True})
    says(node, "WARNING security.allow_unauthenticated: whoever reaches")


def test_doctor_tells_how_peers_authenticate_and_looks_at_a_peer_with_the_secret(
    nodes: Nodes, known: Options, authority: Authority
) -> None:
    def seen(node: Node, *arguments: str) -> dict[str, dict[str, str]]:
        return {check["check"]: check for check in node.cli("doctor", *arguments)["checks"]}

    both = {**known, **authority.section("127.0.0.1")}
    prefill, decode = nodes.pair(security=both)
    plain = nodes.start()
    found = seen(prefill, "--peer", decode.session)
    assert found["security"]["seen"].startswith("peers authenticate by 1 secret and TLS; security.tls_certificate: ")
    assert found["security"]["result"] == "ok"
    assert "rail0" in found["mtu of the peer"]["seen"]
    assert found["mtu of the peer"]["result"] == "ok"
    open_to_all = seen(plain)["security"]
    assert (open_to_all["result"], "loopback addresses only" in open_to_all["seen"]) == ("ok", True)
    assert "secret_files" in open_to_all["seen"]
    stranger = checks.peer_mtu(checks.Node(config.load(plain.config_path), peer=prefill.session))
    assert stranger.result == "fail"
    assert "TLS" in stranger.seen


# ---- offers to single peers ----


def test_a_region_that_is_offered_to_one_peer_opens_for_no_other(nodes: Nodes, known: Options) -> None:
    decode, prefill, other = (nodes.start(security=known) for _ in range(3))
    with decode.connect(0) as receiver, prefill.connect(0) as sender, other.connect(0) as stranger:
        to_one = receiver.alloc(NBYTES)
        offer = to_one.offer(to=prefill.session)
        assert offer == to_one.offer(to=prefill.session)
        assert offer != to_one.offer(to=other.session)
        with pytest.raises(RegionError, match=f"offered to {prefill.session} alone, not to {other.session}") as failure:
            stranger.open(offer)
        assert failure.value.code is ErrorCode.BAD_CAPABILITY
        with pytest.raises(RegionError, match="alone, not to"), decode.connect(1) as neighbour:
            neighbour.open(offer)  # of the same node
        source = sender.alloc(NBYTES)
        source.array[:] = patterns.content(NBYTES, 1)
        remote = sender.open(offer)
        sender.write(remote, [source.address], [remote.address], NBYTES).wait(30)
        assert (to_one.array == source.array).all()
        for client in (sender, stranger):
            client.open(to_one.offer())  # to whoever holds it
        stranger.open(to_one.offer(to=other.session))
        late = to_one.offer(to="127.0.0.1:1")
        to_one.close()
        until(lambda: not remote.peer.has_open(remote), "the sender hears of it")
        for client, gone in ((sender, offer), (stranger, late)):
            with pytest.raises(RegionError, match="offers no such region"):
                client.open(gone)


def test_a_region_is_offered_to_a_neighbour_of_the_same_node_alone(nodes: Nodes) -> None:
    node, other = nodes.pair()
    with node.connect(0) as receiver, node.connect(1) as sender, other.connect(0) as stranger:
        target = receiver.alloc(NBYTES)
        offer = target.offer(to=node.session)
        source = sender.alloc(NBYTES)
        source.array[:] = 7
        remote = sender.open(offer)
        sender.write(remote, [source.address], [remote.address], NBYTES).wait(30)
        assert (target.array == 7).all()
        with pytest.raises(RegionError, match="alone, not to"):
            stranger.open(offer)


def test_an_offer_names_a_session_and_there_are_only_so_many(nodes: Nodes) -> None:
    node = nodes.start(limits={"offers_per_region": 2})
    with node.connect(0) as client:
        target = client.alloc(NBYTES)
        with pytest.raises(PeerError, match=r"expected host:port"):
            target.offer(to="node7")
        with pytest.raises(PeerError, match=r"at most 300"):
            target.offer(to=f"{'.'.join(['n' * 60] * 5)}:1")
        for port in (1, 2):
            target.offer(to=f"127.0.0.1:{port}")
        with pytest.raises(RegionError, match=r"2 single peers; raise limits\.offers_per_region"):
            target.offer(to="127.0.0.1:3")
        target.offer(to="127.0.0.1:1")
        target.offer()
