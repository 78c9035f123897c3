"""What a federation needs to trust each other: a test authority, the server's certificate, a key pair for each node.

An authority made here is for trials and small groups who know each other; its key lies unencrypted in a file.
"""

import datetime
import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from bespokefl.errors import InputError

DAYS = 365
CURVE = ec.SECP384R1()  # Flower takes keys on NIST's curves
_BEFORE = datetime.timedelta(minutes=5)  # clocks differ a little
_PEM, _PLAIN = serialization.Encoding.PEM, serialization.NoEncryption()


@dataclass(frozen=True)
class Certificates:
    """Where the files of a federation lie."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def server(self) -> Path:
        return self.folder / "server.pem"

    @property
    def server_key(self) -> Path:
        return self.folder / "server.key"

    def node_key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def public_keys(self) -> list[Path]:
        return sorted(self.folder.glob("*.pub"))


def make_certificates(folder: Path, hosts: Iterable[str], nodes: Iterable[str], days: float = DAYS) -> Certificates:
    """Writes all files, or none where one of them is there already."""
    nodes = list(nodes)
    _check_names(nodes)
    place = Certificates(folder)
    files = dict(_files(place, list(hosts), nodes, datetime.timedelta(days=days)))
    for path in files:
        if path.exists():
            raise InputError(f"{path} exists already and is not overwritten; give another folder, or remove it.")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path, content in files.items():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
    except OSError as error:
        raise InputError(f"{folder} cannot be written to ({error}).") from None
    return place


def _check_names(nodes: list[str]) -> None:
    """A node's name is that of its files: it stays in the folder, and takes no other file's place."""
    for name in nodes:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name in ("ca", "server"):
            raise InputError(
                f"--node {name!r}: a name is made of letters, digits, '.', '_' and '-', begins with a letter or digit, "
                "and is neither ca nor server."
            )
    if len(set(nodes)) != len(nodes):
        raise InputError(f"--node: {', '.join(nodes)}: each should stand there once.")


def own_names() -> list[str]:
    """Names and addresses under which this machine may be reached, the local ones first."""
    found = ["localhost", "127.0.0.1", "::1", socket.gethostname()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: asks which of our addresses faces the outside
            found.append(probe.getsockname()[0])
        except OSError:
            pass  # no network: the local names remain
    return list(dict.fromkeys(found))


def read_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"--key {path} cannot be read as a private key ({error}).") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"--key {path} is not an ECDSA key; make one with `bespoke certs` or `ssh-keygen -t ecdsa`.")
    return key


def read_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a public key ({error}).") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InputError(f"{path} is not an ECDSA key; make one with `bespoke certs` or `ssh-keygen -t ecdsa`.")
    return key


# making ------------------------------------------------------------------------------------------------------


def _files(
    place: Certificates, hosts: list[str], nodes: list[str], lasting: datetime.timedelta
) -> Iterator[tuple[Path, bytes]]:
    authority_key, server_key = ec.generate_private_key(CURVE), ec.generate_private_key(CURVE)
    authority = _authority(authority_key, lasting)
    yield place.ca, authority.public_bytes(_PEM)
    yield place.folder / "ca.key", authority_key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, _PLAIN)
    yield place.server, _server(server_key, authority, authority_key, hosts, lasting).public_bytes(_PEM)
    yield place.server_key, server_key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, _PLAIN)
    for name in nodes:
        key = ec.generate_private_key(CURVE)
        yield place.node_key(name), key.private_bytes(_PEM, serialization.PrivateFormat.OpenSSH, _PLAIN)
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        yield place.folder / f"{name}.pub", public + f" {name}\n".encode()


def _authority(key: ec.EllipticCurvePrivateKey, lasting: datetime.timedelta) -> x509.Certificate:
    name = _name("Bespoke test authority")
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        _draft(name, name, key, lasting)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )


def _server(
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    hosts: list[str],
    lasting: datetime.timedelta,
) -> x509.Certificate:
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    return (
        _draft(_name("Bespoke server"), authority.subject, key, lasting)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority_key, hashes.SHA384())
    )


def _draft(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, lasting: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    begin = min(now - _BEFORE, now + lasting - _BEFORE)  # also where it is to have expired already
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(now + lasting)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
