"""Which variables of the user's the programs that we start get: what they need to run, and no secrets."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from skyward.api.secret import looks_secret

__all__ = ["installer_environment", "ssh_environment"]

_NAMES = frozenset(
    """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TERM PWD TMPDIR TMP TEMP NO_COLOR
    HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY FTP_PROXY RSYNC_PROXY
    SSL_CERT_FILE SSL_CERT_DIR SSL_CLIENT_CERT REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NETRC
    LD_LIBRARY_PATH DYLD_LIBRARY_PATH LIBRARY_PATH CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH PKG_CONFIG_PATH
    CC CXX CPP AR LD AS NM RANLIB STRIP FC CFLAGS CXXFLAGS CPPFLAGS LDFLAGS ARCHFLAGS MAKEFLAGS MAX_JOBS
    MACOSX_DEPLOYMENT_TARGET SDKROOT DEVELOPER_DIR RUSTFLAGS CARGO_HOME RUSTUP_HOME SOURCE_DATE_EPOCH
    TORCH_CUDA_ARCH_LIST FORCE_CUDA
    """.split()
)
_PREFIXES = ("LC_", "XDG_", "UV_", "PIP_", "PYENV_", "ASDF_", "CMAKE_", "CUDA_", "ROCM_", "HIP_", "SKYWARD_")
# What git and the ssh that it starts are told; only for packages that come out of a repository.
_GIT = ("GIT_", "SSH_")
_INDEX_LOGIN = re.compile(r"UV_INDEX_\w+_(?:USERNAME|PASSWORD)")
_PUBLISHING = re.compile(r"UV_PUBLISH_")
_AGENT = "SSH_AUTH_SOCK"  # a socket, not a secret: what it is for is done by ssh itself
# A user name and a password in an address, as in postgres://me:password@host/.
_LOGIN = re.compile(r"://[^/\s]*:[^/\s]*@")


def installer_environment(environ: Mapping[str, str], *, repositories: bool = False) -> dict[str, str]:
    """What programs get that fetch, build and install packages: settings, proxies, certificates and logins of indexes.

    Whatever is built runs with it. `repositories` adds what git needs to log in.
    """
    prefixes = (*_PREFIXES, *_GIT) if repositories else _PREFIXES

    def is_passed(name: str) -> bool:
        if _INDEX_LOGIN.fullmatch(name):
            return True
        known = name.upper() in _NAMES or name.startswith(prefixes)
        # The values of git's settings may hold logins, which is what they are for.
        secret = not name.startswith("GIT_CONFIG_") and _is_secret(name)
        return known and not secret and not _PUBLISHING.match(name)

    return {name: value for name, value in environ.items() if is_passed(name)}


def ssh_environment(environ: Mapping[str, str], logins: Collection[str] = ()) -> dict[str, str]:
    """What ssh gets, whose own settings may start any other program: all but what looks like a secret, and `logins`."""
    return {
        name: value
        for name, value in environ.items()
        if name in logins or (not _is_secret(name) and (name.upper() in _NAMES or not _LOGIN.search(value)))
    }


def _is_secret(name: str) -> bool:
    return name != _AGENT and looks_secret(name)
