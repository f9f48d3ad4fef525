"""From an Airflow connection to the options of an object store, and which of them a job may be told.

Purpose: the connections that people have for S3, Google Cloud Storage and Azure
Blob (types ``aws``, ``google_cloud_platform``, ``wasb``, ``adls``), translated to
obstore's names. The fields are those of the providers' own documentation. Any
other type holds obstore's options in its extra, as they are.

What it does not do: import Airflow, open a store, or ask a cloud for anything.

Limits: what obstore cannot do is refused and said, never left out in silence: an
AWS role or profile, a Google key in Secret Manager, impersonation. Where the
process itself has an identity (workload identity, an instance role), no
connection is needed.

Example::

    options = store_options(conn)   # {"access_key_id": ..., "endpoint": "http://minio:9000", "allow_http": True}
    public_options(options)         # {"endpoint": "http://minio:9000", "allow_http": True}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

from airflow_gpu.rundir.sftp import sftp_options
from airflow_gpu.rundir.store import StoreError

PUBLIC: Final = frozenset(
    {
        # S3
        "region", "default_region", "endpoint", "virtual_hosted_style_request", "s3_express", "request_payer",
        "unsigned_payload", "checksum_algorithm", "server_side_encryption", "sse_kms_key_id", "sse_bucket_key_enabled",
        # Google Cloud Storage
        "base_url",
        # Azure Blob
        "account_name", "use_emulator", "use_fabric_endpoint",
        # all of them
        "skip_signature", "disable_tagging",
        # of the HTTP client
        "allow_http", "allow_invalid_certificates", "root_certificate", "connect_timeout", "read_timeout", "timeout",
        "http1_only", "http2_only", "http2_keep_alive_interval", "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle", "pool_idle_timeout", "pool_max_idle_per_host", "randomize_addresses", "user_agent",
    }
)  # fmt: skip
"""The options that a job may be told, by obstore's names: where a store is and how it is spoken to.

A closed list: what is not in it stays on Airflow's side. Not in it, beside all keys and
tokens: whose identity is used (the job has its own), files of this machine, proxies and
headers, which may hold a password.
"""

_PREFIXES: Final = ("aws_", "azure_storage_", "azure_", "google_")
_ALIASES: Final = {
    "endpoint_url": "endpoint",
    "token": "session_token",  # of S3 only; Azure's is a bearer token, see _plain
    "sas_token": "sas_key",
    "access_key": "account_key",
    "master_key": "account_key",
    "authority_id": "tenant_id",
    "service_account_path": "service_account",
}

_UNUSED: Final = {
    "aws": ("aws_account_id", "service_config", "config_kwargs", "verify", "assume_role_method", "assume_role_kwargs"),
    "google_cloud_platform": ("project", "scope", "num_retries", "quota_project_id", "key_secret_project_id"),
    "wasb": ("client_secret_auth_config", "workload_identity_tenant_id"),
    "adls": ("client_secret_auth_config", "workload_identity_tenant_id"),
}  # fmt: skip
"""Fields of the providers that say nothing to a store, or that are read below."""

_REFUSED: Final = {
    "aws": ("role_arn", "profile_name"),
    "google_cloud_platform": ("key_secret_name", "impersonation_chain", "credential_config_file"),
}


def store_options(conn: Any) -> dict[str, Any]:
    """Options for :class:`~airflow_gpu.rundir.store.Store`, by obstore's names, secrets among them.

    :param conn: a connection: Airflow's, or anything with its fields.
    :raises StoreError: a field asks for what obstore cannot do, or cannot be understood. Names the field, no value.
    """
    kind = conn.conn_type or ""
    if kind in ("ssh", "sftp"):
        return sftp_options(conn)
    extra = _fields(kind, dict(conn.extra_dejson or {}))
    for name in _REFUSED.get(kind, ()):
        if extra.get(name):
            raise StoreError(
                f"connection {conn.conn_id!r}: {name} cannot be used for a store; give keys, or name no connection, "
                "so that the identity of the process counts"
            )
    try:
        found = _TRANSLATED.get(kind, _nothing)(conn, extra)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        # The error itself could hold a part of a key.
        raise StoreError(
            f"connection {conn.conn_id!r}: its fields cannot be understood ({type(error).__name__})"
        ) from None
    for name, value in extra.items():
        if name not in _UNUSED.get(kind, ()) and value not in (None, ""):
            found.setdefault(_plain(name, kind), value)
    for name in ("endpoint", "base_url"):
        if str(found.get(name, "")).startswith("http://"):
            found.setdefault("allow_http", True)
    return found


def public_options(options: Mapping[str, Any]) -> dict[str, str | bool]:
    """Those of the options that a job may be told (:data:`PUBLIC`), as strings and booleans.

    :raises StoreError: the address of the store has a password or a query in it, so that it cannot be told.
    """
    found: dict[str, str | bool] = {}
    for given, value in options.items():
        name = _plain(given)
        if name not in PUBLIC or value is None:
            continue
        if name in ("endpoint", "base_url"):
            parts = urlsplit(str(value))
            if parts.username is not None or parts.query or parts.fragment:
                raise StoreError(
                    f"{given} has a name, a password or a query in it, which no job is told; credentials belong into "
                    "the other fields of the connection"
                )
        found[name] = value if isinstance(value, bool) else _text(value)
    return found


def _text(value: Any) -> str:
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g}s"
    return value.decode() if isinstance(value, bytes) else str(value)


def _plain(name: str, kind: str = "") -> str:
    """Obstore's shortest name of an option, so that none is given twice."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            if prefix != "aws_" and name.removeprefix(prefix) == "token":
                return name
            name = name.removeprefix(prefix)
            break
    if name == "token" and kind in ("wasb", "adls"):
        return name
    return _ALIASES.get(name, name)


def _fields(kind: str, extra: dict[str, Any]) -> dict[str, Any]:
    """The extra without the prefix that older connections have: ``extra__wasb__sas_token``."""
    prefix = f"extra__{kind}__"
    plain = {name: value for name, value in extra.items() if not name.startswith(prefix)}
    for name, value in extra.items():
        if name.startswith(prefix):
            plain.setdefault(name.removeprefix(prefix), value)
    return plain


def _nothing(conn: Any, extra: dict[str, Any]) -> dict[str, Any]:
    return {}


def _given(**options: Any) -> dict[str, Any]:
    """Those that have a value."""
    return {name: value for name, value in options.items() if value not in (None, "")}


# -- S3 --------------------------------------------------------------------------------------------


def _aws(conn: Any, extra: dict[str, Any]) -> dict[str, Any]:
    s3 = (extra.get("service_config") or {}).get("s3") or {}
    config = extra.get("config_kwargs") or {}
    config = json.loads(config) if isinstance(config, str) else config
    found = _given(
        access_key_id=conn.login,
        secret_access_key=conn.password,
        region=extra.pop("region_name", None),
        endpoint=s3.get("endpoint_url") or extra.pop("endpoint_url", None),
    )
    extra.pop("endpoint_url", None)  # that of the service goes first
    if (config.get("s3") or {}).get("addressing_style") == "virtual":
        found["virtual_hosted_style_request"] = True
    if config.get("signature_version") == "unsigned":
        found["skip_signature"] = True
    verify = extra.get("verify")
    if verify is False or str(verify).lower() == "false":
        found["allow_invalid_certificates"] = True
    elif verify not in (None, "", True) and str(verify).lower() != "true":
        with open(str(verify), encoding="ascii") as file:
            found["root_certificate"] = file.read()
    return found


# -- Google Cloud Storage --------------------------------------------------------------------------


def _google(conn: Any, extra: dict[str, Any]) -> dict[str, Any]:
    key, path = extra.pop("keyfile_dict", None), extra.pop("key_path", None)
    anonymous = str(extra.pop("is_anonymous", "")).lower() == "true"
    if key and not isinstance(key, str):
        key = json.dumps(key)
    return _given(service_account_key=key, service_account=path, skip_signature=anonymous or None)


# -- Azure Blob ------------------------------------------------------------------------------------


def _azure(conn: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """In the order in which the provider's hook looks for them: only one way to log in counts."""
    taken = (
        "connection_string",
        "tenant_id",
        "shared_access_key",
        "sas_token",
        "account_key",
        "account_host",
    )
    given = {name: extra.pop(name, None) for name in (*taken, "managed_identity_client_id")}
    if given["connection_string"]:
        return _connection_string(str(given["connection_string"]))
    found = _account(conn, given["account_host"], is_client=bool(given["tenant_id"]))
    if given["tenant_id"]:
        return found | _given(tenant_id=given["tenant_id"], client_id=conn.login, client_secret=conn.password)
    if given["shared_access_key"]:
        return found | {"account_key": given["shared_access_key"]}
    if given["sas_token"]:
        token = str(given["sas_token"])
        if token.startswith("https"):
            url = urlsplit(token)
            return found | _address(f"{url.scheme}://{url.netloc}{url.path}") | {"sas_key": url.query}
        return found | {"sas_key": token.removeprefix("?")}
    key = conn.password or given["account_key"]
    return found | _given(account_key=key, client_id=None if key else given["managed_identity_client_id"])


def _account(conn: Any, domain: Any, *, is_client: bool) -> dict[str, Any]:
    """Which account, and where: the host is an account's name or its address, the login its name unless it logs in."""
    host = str(conn.host or "")
    if host and not any(mark in host for mark in ".:/"):
        found = {"account_name": host}
    else:
        if host and "://" not in host:
            host = f"https://{host}"
        if host and conn.port:
            host = f"{host.rstrip('/')}:{conn.port}"
        found = _address(host) if host else {}
    if domain:
        found["endpoint"] = f"https://{domain}"
    if conn.login and not is_client:
        found["account_name"] = conn.login
    return found


def _address(url: str) -> dict[str, Any]:
    """``https://name.blob.core.windows.net`` is obstore's own default; anything else is an endpoint."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host.endswith((".blob.core.windows.net", ".dfs.core.windows.net")):
        return {"account_name": host.partition(".")[0]}
    return {"account_name": parts.path.strip("/") or host.partition(".")[0], "endpoint": url.rstrip("/")}


def _connection_string(text: str) -> dict[str, Any]:
    """https://learn.microsoft.com/azure/storage/common/storage-configure-connection-string"""
    parts = dict(item.split("=", 1) for item in text.strip().strip(";").split(";"))
    fields = {name.lower(): value for name, value in parts.items()}
    account, endpoint = fields.get("accountname"), fields.get("blobendpoint")
    suffix, scheme = fields.get("endpointsuffix"), fields.get("defaultendpointsprotocol", "https")
    if endpoint is None and account and suffix and (suffix != "core.windows.net" or scheme == "http"):
        endpoint = f"{scheme}://{account}.blob.{suffix}"
    found = _address(endpoint) if endpoint else {}
    sas = fields.get("sharedaccesssignature")
    return found | _given(
        account_name=account,
        account_key=fields.get("accountkey"),
        sas_key=sas.removeprefix("?") if sas else None,
    )


_TRANSLATED: Final = {
    "aws": _aws,
    "google_cloud_platform": _google,
    "wasb": _azure,
    "adls": _azure,
}
