"""The machine's kernel: Debian's, downloaded and unpacked into a cache folder, installed nowhere. The one for clouds
has neither rdma_rxe nor 9p."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import lzma
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vm.packages import NotPrepared, said, update

_META: Final = "linux-image-amd64"
_INIT: Final = Path(__file__).resolve().parent / "guest" / "init"
_BUSYBOX: Final = Path("/bin/busybox")
_MODULES: Final = (
    *("virtio_pci", "virtio_console", "virtio_rng", "9pnet_virtio", "9p", "overlay"),
    *("veth", "bridge", "sch_netem", "sch_plug"),
    *("crc32_generic", "ib_uverbs", "rdma_ucm", "rdma_rxe"),
)
_XZ: Final = b"\xfd7zXZ\0"
_ELF: Final = b"\x7fELF"


@dataclass(frozen=True)
class Kernel:
    release: str
    image: Path
    initramfs: Path


def prepared(cache: Path) -> Kernel:
    """The newest that apt knows; the newest of the cache where apt knows none or cannot download it."""
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "lock"):
        archive = _archive(cache)
        release = archive.name.split("_")[0].removeprefix("linux-image-")
        image = archive.with_suffix(".image")
        initramfs = archive.with_suffix(f".{_digest()}.cpio")
        if not image.exists() or not initramfs.exists():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                _unpack(archive, release, Path(work), image, initramfs)
        return Kernel(release, image, initramfs)


def _archive(cache: Path) -> Path:
    name = _newest()
    if name is None or not (cache / name).exists():
        update()
        name = _newest()
    if name is not None and not (cache / name).exists():
        package = name.split("_")[0]
        print(f"vm: downloading {package}", flush=True)
        with contextlib.suppress(NotPrepared), tempfile.TemporaryDirectory(dir=cache) as work:
            said(["apt-get", "-q", "download", package], cwd=Path(work))
            next(Path(work).glob("*.deb")).rename(cache / name)
    if name is not None and (cache / name).exists():
        return cache / name
    earlier = sorted(cache.glob("linux-image-*.deb"), key=lambda path: path.stat().st_mtime)
    if not earlier:
        raise NotPrepared(f"no kernel: apt knows no {_META}, or could not download it; apt-get update, and run again")
    return earlier[-1]


def _newest() -> str | None:
    """Its file's name."""
    with contextlib.suppress(NotPrepared):
        package = re.search(r"Depends: (linux-image-\S+)", said(["apt-cache", "depends", _META]))
        if package:
            uris = said(["apt-get", "download", "--print-uris", package[1]])
            file = re.search(r"^'\S+' (\S+\.deb) ", uris, re.MULTILINE)
            return file[1].replace("%3a", ":") if file else None
    return None


def _unpack(archive: Path, release: str, work: Path, image: Path, initramfs: Path) -> None:
    print(f"vm: unpacking {archive.name}", flush=True)
    unpacked, root = work / "package", work / "root"
    said(["dpkg", "-x", str(archive), str(unpacked)])
    said(["/sbin/depmod", "-b", str(unpacked), release])
    (work / "image").write_bytes(_uncompressed((unpacked / "boot" / f"vmlinuz-{release}").read_bytes()))
    for folder in ("bin", "modules", "proc", "sys", "dev", "lower", "upper", "root"):
        (root / folder).mkdir(parents=True)
    shutil.copy(_BUSYBOX, root / "bin" / "busybox")
    shutil.copy(_INIT, root / "init")
    order = _in_load_order(unpacked / "lib" / "modules" / release)
    for path in order:
        shutil.copy(path, root / "modules")
    (root / "modules" / "order").write_text("".join(f"{path.name}\n" for path in order))
    said(["sh", "-c", "find . | cpio --quiet -o -H newc >../initramfs"], cwd=root)
    (work / "image").rename(image)
    (work / "initramfs").rename(initramfs)


def _uncompressed(image: bytes) -> bytes:
    """An ELF kernel boots without unpacking itself, which takes long under emulation. Other packings stay."""
    start = image.find(_XZ)
    if start < 0:
        return image
    kernel = lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(image[start:])
    return kernel if kernel.startswith(_ELF) else image


def _in_load_order(modules: Path) -> list[Path]:
    needs: dict[str, list[str]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[Path(path).name.split(".")[0].replace("-", "_")] = [*reversed(others.split()), path]
    missing = [name for name in _MODULES if name not in needs]
    if missing:
        raise NotPrepared(f"the kernel package has no module {', '.join(missing)}")
    return [modules / path for path in dict.fromkeys(path for name in _MODULES for path in needs[name])]


def _digest() -> str:
    """Of what the initramfs is made of, but for the kernel."""
    parts = [_INIT.read_bytes(), _BUSYBOX.read_bytes(), *(name.encode() for name in _MODULES)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:8]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One preparation at a time."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
