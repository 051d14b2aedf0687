"""What the README has operators copy: configurations that are taken, commands that do what it says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers import memory
from helpers.nodes import Nodes
from helpers.processes import LIMIT_S, TESTS

from railrelay.daemon import config

pytestmark = pytest.mark.system

README = (TESTS.parent / "README.md").read_text()
NBYTES = 65536


def blocks(language: str, having: str = "") -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [block for block in found if having in block]


@pytest.mark.parametrize("text", blocks("toml"), ids=lambda text: text.split("\n", 1)[0])
def test_every_configuration_is_taken(text: str) -> None:
    config.parse(text)


def test_two_nodes_of_rdma_rails_have_every_option_that_the_text_names() -> None:
    [text] = blocks("toml", "traffic_class")
    loaded = config.parse(text)
    assert (loaded.node.host, loaded.node.port, loaded.security.authenticates) == ("10.0.0.1", 4100, True)
    assert loaded.verbs.traffic_class == 4 * 26
    assert all((rail.nic, rail.port_number, rail.gid_index) == ("verbs", 1, 3) for rail in loaded.rail)
    assert all(rail.device and rail.address and rail.identity for rail in loaded.rail)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_certificates_of_the_recipe_connect_two_daemons_and_are_renewed(nodes: Nodes, tmp_path: Path) -> None:
    folder = tmp_path / "authority"
    folder.mkdir()
    [recipe] = blocks("sh", "openssl x509")
    made = recipe.replace("IP:10.0.0.1", "IP:127.0.0.1")
    assert made != recipe

    def run(text: str) -> None:
        done = subprocess.run(["sh", "-ec", text], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr

    run(made)
    names = {"tls_certificate": "node.crt", "tls_key": "node.key", "tls_ca": "ca.crt"}
    own = {option: str(folder / name) for option, name in names.items()}
    assert (folder / "node.key").stat().st_mode & 0o777 == 0o600
    prefill, decode = nodes.pair(security=own)
    with prefill.connect(0) as sender, decode.connect(0) as receiver:
        link = memory.link(sender, receiver, NBYTES)
        link.source.array[:] = np.arange(NBYTES, dtype=np.uint8)
        sender.write(link.remote, [link.source.address], [link.remote.address], NBYTES).wait(30)
        assert (link.destination.array == link.source.array).all()
    before = (folder / "node.crt").read_bytes()
    run(made[made.index("cat >node.ext") :])
    assert (folder / "node.crt").read_bytes() != before
    with decode.connect(0) as sender:
        sender.peer(prefill.session, timeout=30)
    assert "TLS: certificate, key and CA were read again" in prefill.log + decode.log
    # As Python 3.13 looks at them:
    command = ["openssl", "verify", "-x509_strict", "-CAfile", own["tls_ca"], own["tls_certificate"]]
    subprocess.run(command, check=True, timeout=LIMIT_S, capture_output=True)
