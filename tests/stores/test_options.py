"""Connections as people have them, translated to what obstore takes, and what of it a job may be told.

The fields are those of the providers' documentation (connections/aws, gcp, wasb, adls).
"""

from __future__ import annotations

import json
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu.hooks.store_options import PUBLIC, public_options, store_options
from airflow_gpu.rundir.store import Store, StoreError
from tests.beds.stores.servers import Server
from tests.stores.conftest import Servers

KEY = "hunter2-is-the-secret"
GOOGLE_KEY = {"type": "service_account", "client_email": "x", "private_key": "", "private_key_id": "x", "disable_oauth": True}  # fmt: skip


def conn(conn_type: str, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    given = {"host": None, "login": None, "password": None, "port": None, **fields}
    return SimpleNamespace(conn_id="mine", conn_type=conn_type, extra_dejson=extra or {}, **given)


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (
            conn("aws", {"region_name": "eu-west-1", "aws_session_token": "t"}, login="id", password=KEY),
            {"access_key_id": "id", "secret_access_key": KEY, "region": "eu-west-1", "session_token": "t"},
        ),
        (
            conn("aws", {"aws_access_key_id": "id", "aws_secret_access_key": KEY}),
            {"access_key_id": "id", "secret_access_key": KEY},
        ),
        (
            conn("aws", {"endpoint_url": "http://minio:9000", "verify": False, "aws_account_id": "1"}),
            {"endpoint": "http://minio:9000", "allow_http": True, "allow_invalid_certificates": True},
        ),
        (
            conn("aws", {
                "endpoint_url": "https://other", "service_config": {"s3": {"endpoint_url": "https://s3"}},
                "config_kwargs": {"s3": {"addressing_style": "virtual"}},
            }),
            {"endpoint": "https://s3", "virtual_hosted_style_request": True},
        ),
        (conn("aws", {"aws_endpoint_url": "https://s3", "role_arn": ""}), {"endpoint": "https://s3"}),
        (conn("aws"), {}),
        (
            conn("google_cloud_platform", {"keyfile_dict": json.dumps(GOOGLE_KEY), "project": "p", "num_retries": 5}),
            {"service_account_key": json.dumps(GOOGLE_KEY)},
        ),
        (
            conn("google_cloud_platform", {"extra__google_cloud_platform__keyfile_dict": GOOGLE_KEY}),
            {"service_account_key": json.dumps(GOOGLE_KEY)},
        ),
        (
            conn("google_cloud_platform", {"key_path": "/k.json", "scope": "x"}),
            {"service_account": "/k.json"},
        ),
        (
            conn("google_cloud_platform", {"google_base_url": "http://fake:1", "bearer_token": KEY}),
            {"base_url": "http://fake:1", "bearer_token": KEY, "allow_http": True},
        ),
        (conn("google_cloud_platform", {"is_anonymous": True}), {"skip_signature": True}),
        (conn("wasb", login="acc", password=KEY), {"account_name": "acc", "account_key": KEY}),
        (conn("wasb", {"shared_access_key": KEY}, login="acc"), {"account_name": "acc", "account_key": KEY}),
        (conn("wasb", {"account_key": KEY}, host="https://acc.blob.core.windows.net"), {"account_name": "acc", "account_key": KEY}),
        (conn("wasb", {"sas_token": "?sv=1&sig=x"}, login="acc"), {"account_name": "acc", "sas_key": "sv=1&sig=x"}),
        (
            conn("wasb", {"extra__wasb__sas_token": "https://acc.blob.core.windows.net/?sv=1&sig=x"}),
            {"account_name": "acc", "sas_key": "sv=1&sig=x"},
        ),
        (
            conn("wasb", {"tenant_id": "t"}, host="acc.blob.core.windows.net", login="client", password=KEY),
            {"account_name": "acc", "tenant_id": "t", "client_id": "client", "client_secret": KEY},
        ),
        (
            conn("wasb", {"connection_string": f"DefaultEndpointsProtocol=https;AccountName=acc;AccountKey={KEY}==;EndpointSuffix=core.windows.net"}),
            {"account_name": "acc", "account_key": f"{KEY}=="},
        ),
        (
            conn("wasb", {"connection_string": "BlobEndpoint=https://acc.blob.core.windows.net/;SharedAccessSignature=sv=1&sig=x"}),
            {"account_name": "acc", "sas_key": "sv=1&sig=x"},
        ),
        (
            conn("wasb", {"connection_string": f"AccountName=acc;AccountKey={KEY};BlobEndpoint=http://127.0.0.1:10000/acc;"}),
            {"account_name": "acc", "account_key": KEY, "endpoint": "http://127.0.0.1:10000/acc", "allow_http": True},
        ),
        (
            conn("wasb", host="http://127.0.0.1", port=10000, login="acc", password=KEY),
            {"account_name": "acc", "account_key": KEY, "endpoint": "http://127.0.0.1:10000", "allow_http": True},
        ),
        (conn("wasb", {"managed_identity_client_id": "id"}, login="acc"), {"account_name": "acc", "client_id": "id"}),
        (conn("adls", host="acc", password=KEY), {"account_name": "acc", "account_key": KEY}),
        (
            conn("adls", {"tenant_id": "t", "account_host": "acc.blob.custom.io"}, host="acc", login="c", password=KEY),
            {"account_name": "acc", "endpoint": "https://acc.blob.custom.io", "tenant_id": "t", "client_id": "c", "client_secret": KEY},
        ),
        (conn("generic", {"region": "x", "access_key_id": "id"}), {"region": "x", "access_key_id": "id"}),
    ],
)  # fmt: skip
def test_translated(given: Any, options: dict[str, Any]) -> None:
    assert store_options(given) == options


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (conn("aws", {"role_arn": "arn:aws:iam::1:role/x"}), "role_arn cannot be used for a store"),
        (conn("aws", {"profile_name": "p"}), "profile_name cannot be used"),
        (conn("google_cloud_platform", {"key_secret_name": "s"}), "key_secret_name cannot be used"),
        (conn("google_cloud_platform", {"impersonation_chain": "a"}), "impersonation_chain cannot be used"),
        (
            conn("aws", {"verify": "/no/such/bundle.pem"}),
            "its fields cannot be understood (FileNotFoundError)",
        ),
        (conn("wasb", {"connection_string": KEY}), "its fields cannot be understood"),
        (conn("aws", {"config_kwargs": f"{{{KEY}"}), "its fields cannot be understood"),
    ],
)
def test_what_obstore_cannot_do_is_said(given: Any, says: str) -> None:
    with pytest.raises(StoreError) as refused:
        store_options(given)
    assert says in str(refused.value)
    assert "'mine'" in str(refused.value)
    assert KEY not in f"{refused.value!r}{refused.value.__cause__!r}"


def test_a_misspelt_option_is_named_when_the_store_is_opened() -> None:
    with pytest.raises(StoreError, match="regoin"):
        Store("s3://b", store_options(conn("aws", {"regoin": "x"})))


def as_connection(server: Server) -> Any:
    """What a person would type in for the test's servers."""
    options = server.options
    if server.name == "s3":
        extra = {"region_name": options["region"], "endpoint_url": options["endpoint"]}
        return conn("aws", extra, login=options["access_key_id"], password=options["secret_access_key"])
    if server.name == "gcs":
        extra = {"keyfile_dict": {**GOOGLE_KEY, "gcs_base_url": options["base_url"]}, "allow_http": True}
        return conn("google_cloud_platform", extra)
    return conn(
        "wasb", host=options["endpoint"], login=options["account_name"], password=options["account_key"]
    )


async def test_real_stores_take_them(server: Server) -> None:
    store = Store(server.uri, store_options(as_connection(server)))
    await store.prove()


async def test_an_azure_connection_string(servers: Servers) -> None:
    options = servers["azure"].options
    text = f"AccountName={options['account_name']};AccountKey={options['account_key']};BlobEndpoint={options['endpoint']}"
    store = Store(servers["azure"].uri, store_options(conn("wasb", {"connection_string": text})))
    await store.prove()


# -- what a job may be told ------------------------------------------------------------------------


def test_only_what_is_listed_travels(server: Server) -> None:
    options = store_options(as_connection(server))
    told = public_options(options)
    secrets = {value for name, value in server.options.items() if name not in PUBLIC}
    assert secrets, "each server has some"
    for secret in secrets:
        assert str(secret) not in json.dumps(told)
    assert told["allow_http"] is True


SENSITIVE = (
    "access_key_id", "aws_access_key_id", "secret_access_key", "session_token", "aws_session_token", "token",
    "sse_customer_key_base64", "role_arn", "web_identity_token_file", "container_authorization_token_file",
    "service_account", "google_service_account_key", "bearer_token", "application_credentials",
    "account_key", "azure_storage_account_key", "sas_key", "sas_token", "client_id", "client_secret", "tenant_id",
    "federated_token_file", "encryption_key", "fabric_session_token", "azure_storage_token",
    "proxy_url", "default_headers", "credential_provider", "password", "anything_that_comes_later",
)  # fmt: skip


@given(
    hidden=st.dictionaries(st.sampled_from(SENSITIVE), st.just(KEY)),
    told=st.dictionaries(st.sampled_from(sorted(PUBLIC - {"endpoint", "base_url"})), st.booleans()),
)
def test_of_any_options_the_rest_stays(hidden: dict[str, Any], told: dict[str, bool]) -> None:
    assert public_options({**hidden, **told}) == told


def test_names_and_values_as_the_job_reads_them() -> None:
    told = public_options(
        {
            "aws_endpoint_url": "http://minio:9000",
            "aws_region": "x",
            "timeout": timedelta(seconds=30),
            "pool_max_idle_per_host": 3,
            "root_certificate": b"---",
            "azure_storage_account_name": "acc",
            "allow_http": "true",
            "s3_express": None,
        }
    )
    assert told == {
        "endpoint": "http://minio:9000",
        "region": "x",
        "timeout": "30s",
        "pool_max_idle_per_host": "3",
        "root_certificate": "---",
        "account_name": "acc",
        "allow_http": "true",
    }
    json.dumps(told)


@pytest.mark.parametrize("name", ["endpoint", "aws_endpoint", "google_base_url"])
@pytest.mark.parametrize(
    "url", [f"http://me:{KEY}@minio", f"https://minio?sig={KEY}", f"https://{KEY}@minio"]
)
def test_an_address_with_a_password_is_not_told(name: str, url: str) -> None:
    with pytest.raises(StoreError) as refused:
        public_options({name: url})
    assert name in str(refused.value)
    assert KEY not in str(refused.value)
