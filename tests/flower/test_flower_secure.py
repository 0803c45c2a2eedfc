"""TLS and SuperNode authentication, with Flower's own mechanism and certificates made here."""

import datetime
import ipaddress
import json
import socket
import ssl

import engines
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from test_flower_engines import books


def certificates(folder):
    """Make an authority and a certificate for 127.0.0.1; return paths of authority, certificate and key."""
    authority_key, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)

    def sign(name, public, extension, critical):
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(public)
        builder = builder.serial_number(x509.random_serial_number()).add_extension(extension, critical)
        builder = builder.not_valid_before(now - datetime.timedelta(minutes=5))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1))
        return builder.sign(authority_key, hashes.SHA384())

    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    authority = sign(issuer, authority_key.public_key(), x509.BasicConstraints(True, 0), True)
    server = sign(subject, key.public_key(), alternative, False)
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    paths = folder / "ca.crt", folder / "server.pem", folder / "server.key"
    contents = authority.public_bytes(pem), server.public_bytes(pem), private
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def node_key(folder, name):
    """Make a key pair of a SuperNode as `ssh-keygen -t ecdsa -b 384` would; return its private file."""
    key = ec.generate_private_key(ec.SECP384R1())
    path = folder / name
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
    )
    path.chmod(0o600)
    public = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(*public))
    return path


@pytest.mark.slow
def test_tls_and_authentication(tmp_path):
    secure = certificates(tmp_path)
    a, b, stranger = (node_key(tmp_path, name) for name in ("a", "b", "stranger"))
    settings = {"RTOPK_TEST_ROUNDS": "2"}
    with engines.fleet_of(tmp_path, settings, secure=secure, authenticated=True) as fleet:
        fleet.add_node({"client-id": "stranger-file"}, key=stranger)
        for key in (a, b):
            assert fleet.flwr("supernode", "register", str(key.with_suffix(".pub")), "fleet")["success"]
        for key in (a, b):
            fleet.add_node({"client-id": f"{key.name}-file"}, key=key)
        run = engines.submit(fleet, "calm_app")
        assert fleet.wait(run, done=(tmp_path / "result.pt").exists, seconds=300) == "finished:completed"
        assert "Connection attempt failed" in fleet.tail("supernode-0")  # nobody registered its key
        trusting = ssl.create_default_context(cafile=str(secure[0]))
        with (
            socket.create_connection(("127.0.0.1", fleet.port)) as plain,
            trusting.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped,
        ):
            assert wrapped.version() == "TLSv1.3"
    result = torch.load(tmp_path / "result.pt", weights_only=True)
    assert result["rounds"] == {"a-file": 1, "b-file": 1}
    assert not (tmp_path / "moved" / "stranger-file").exists()
    for client in ("a-file", "b-file"):
        moved, held = books(tmp_path, client)
        assert torch.allclose(held, moved, atol=1e-5)
    assert engines.leftovers(tmp_path) == []


@pytest.mark.slow
def test_the_deployment_of_the_command_line_speaks_tls(tmp_path):
    """With the certificates it runs and says so; a folder without them is refused before anything starts."""
    options = ["fed", "deploy", "--rounds", "1", "--nodes", "2", "--local-steps", "1"]
    folder = tmp_path / "certificates"
    folder.mkdir()
    refused = engines.rtopk(*options, "--tls", str(folder), "--out", str(tmp_path / "none"))
    assert refused.returncode == 1
    assert "lacks ca.crt, server.pem, server.key" in refused.stderr
    assert not (tmp_path / "none" / "superlink.log").exists()
    certificates(folder)
    done = engines.rtopk(*options, "--tls", str(folder), "--out", str(tmp_path / "run"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tls"] is True
    assert "root-certificates" in (tmp_path / "run" / "home" / "config.toml").read_text()
    assert not any(
        "insecure" in log.read_text().lower() for log in (tmp_path / "run").glob("supernode-*.log")
    )
    assert engines.leftovers(tmp_path) == []
