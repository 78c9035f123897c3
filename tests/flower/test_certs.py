"""Certificates and keys, checked by what will use them: OpenSSL's handshake, Flower's own loaders, the file system."""

import ssl
import stat
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs flwr: pip install bespokefl[flower]")

from flwr.cli.supernode.register import try_load_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from bespokefl.errors import InputError
from bespokefl.flower.transport.certs import (
    Certificates,
    make_certificates,
    own_names,
    read_private_key,
    read_public_key,
)


def handshake(server: Certificates, ca: Path, name: str) -> None:
    """Both sides of a TLS handshake, over memory."""
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(server.server, server.server_key)
    ours = ssl.create_default_context(cafile=str(ca))
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ours.wrap_bio(down, up, server_hostname=name)
    host = theirs.wrap_bio(up, down, server_side=True)
    waiting = [client, host]
    while waiting:
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                pass


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certs") / "new", ["localhost", "127.0.0.1", "::1"], ["a", "b"])


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1"])
def test_a_client_that_trusts_the_authority_accepts_every_name(made: Certificates, name: str) -> None:
    handshake(made, made.ca, name)


def test_other_names_and_other_authorities_are_refused(made: Certificates, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(made, made.ca, "example.org")
    other = make_certificates(tmp_path / "other", ["localhost"], [])
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made, other.ca, "localhost")


def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    expired = make_certificates(tmp_path / "expired", ["localhost"], [], days=-0.5)
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        handshake(expired, expired.ca, "localhost")


def test_only_the_owner_can_read(made: Certificates) -> None:
    files = sorted(path.name for path in made.folder.iterdir())
    assert files == ["a.key", "a.pub", "b.key", "b.pub", "ca.key", "ca.pem", "server.key", "server.pem"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made.folder.iterdir()} == {0o600}


def test_nothing_is_overwritten(made: Certificates) -> None:
    before = {path: path.read_bytes() for path in made.folder.iterdir()}
    with pytest.raises(InputError, match="exists already"):
        make_certificates(made.folder, ["localhost"], ["c"])
    assert {path: path.read_bytes() for path in made.folder.iterdir()} == before


def test_keys_belong_together_and_flower_reads_them(made: Certificates) -> None:
    private, public = read_private_key(made.node_key("a")), read_public_key(made.folder / "a.pub")
    assert public_key_to_bytes(private.public_key()) == public_key_to_bytes(public)
    assert try_load_public_key(made.folder / "a.pub") == public_key_to_bytes(public)
    assert public.curve.name == "secp384r1"


def test_openssl_agrees(made: Certificates) -> None:
    command = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", made.ca, made.server]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs the openssl command")
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_that_are_no_keys_are_named(tmp_path: Path, made: Certificates) -> None:
    (tmp_path / "text").write_text("hello")
    for path in (tmp_path / "text", tmp_path / "absent"):
        with pytest.raises(InputError, match=path.name):
            read_private_key(path)
        with pytest.raises(InputError, match=path.name):
            read_public_key(path)


def test_own_names_begin_with_the_local_ones() -> None:
    assert own_names()[:3] == ["localhost", "127.0.0.1", "::1"]


def test_keys_of_ssh_keygen_are_read(tmp_path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", tmp_path / "ben"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs the ssh-keygen command")
    private, public = read_private_key(tmp_path / "ben"), read_public_key(tmp_path / "ben.pub")
    assert public_key_to_bytes(private.public_key()) == public_key_to_bytes(public)
