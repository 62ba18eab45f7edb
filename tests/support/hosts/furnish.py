"""What makes a set of namespaces look like a host from inside: homes, settings, devices, sshd. For init.py."""

from __future__ import annotations

import glob
import os
import resource
import shutil
import socket
import stat
import subprocess
import time
from typing import Any

from kernel import BIND, NODEV, NOEXEC, NOSUID, RDONLY, REC, RELATIME, REMOUNT, bind, mount

__all__ = ["make_host", "start_sshd"]


def make_host(name: str, host: dict[str, Any]) -> None:
    """Gives the host its own name, homes, temporary directories, settings, processes and devices."""
    socket.sethostname(name)
    base: str = host["directory"]
    fill_homes(base, host)
    write_etc(name, os.path.join(base, "etc"), host)
    # Sources are held open: the directories that contain them are about to be covered.
    own: dict[str, int] = {path: hold(os.path.join(base, part)) for part, path in host["own"].items()}
    shared = {path: hold(source) for path, source in host["share"].items()}
    shown = {path: hold(source) for path, source in host["show"].items()}
    empty = {path: hold(os.path.join(base, "empty")) for path in host["covered"] if os.path.isdir(path)}
    cgroups = hold("/sys/fs/cgroup") if os.path.isdir("/sys/fs/cgroup") else None

    for number, path in enumerate(host["writable"]):
        cover(path, os.path.join(base, "layers", f"own-{number}"))
    hide_programs(base, host["hide"])
    for path, source in {**empty, **own}.items():
        bind(source, path)
    mount("tmpfs", "/run", "tmpfs", NOSUID | NODEV, "mode=755")
    for path, mode in (("/run/sshd", 0o755), ("/run/lock", 0o1777), ("/run/user", 0o755)):
        make(path, mode)
    for path, source in shared.items():
        os.makedirs(path, exist_ok=True)
        bind(source, path)
        os.chown(path, host["users"][0]["id"], host["users"][0]["id"])
    for path, source in shown.items():
        os.makedirs(path, exist_ok=True)
        bind(source, path)
        mount(None, path, None, REMOUNT | BIND | RDONLY | RELATIME)
    if host["tmp_size"]:
        mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV, f"mode=1777,size={host['tmp_size']}")
    if host["noexec_tmp"]:
        mount(None, "/tmp", None, REMOUNT | BIND | NOEXEC | NOSUID | NODEV | RELATIME)
    if host["read_only_home"]:
        mount(None, "/home", None, REMOUNT | BIND | RDONLY | RELATIME)
    mount("tmpfs", "/dev/shm", "tmpfs", NOSUID | NODEV, "mode=1777")
    mount("devpts", "/dev/pts", "devpts", NOSUID | NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5")
    mount("/dev/pts/ptmx", "/dev/ptmx", None, BIND)
    mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
    mount("sysfs", "/sys", "sysfs", NOSUID | NODEV | NOEXEC)  # a new one shows the links of this host
    if cgroups is not None:
        bind(cgroups, "/sys/fs/cgroup", REC)
    # Last, since what is bound takes this along: the machine's own files can only be read, even by root here.
    mount(None, "/", None, REMOUNT | BIND | RDONLY | RELATIME)


def hide_programs(base: str, patterns: list[str]) -> None:
    """Makes files invisible: a layer over their directory says of each that it is not there."""
    hidden: dict[str, set[str]] = {}
    for path in sorted(found for pattern in patterns for found in glob.glob(pattern)):
        hidden.setdefault(os.path.realpath(os.path.dirname(path)), set()).add(os.path.basename(path))
    for number, (directory, names) in enumerate(hidden.items()):
        layer = os.path.join(base, "layers", f"names-{number}")
        make(layer, 0o755)
        for name in names:
            if not os.path.lexists(os.path.join(layer, name)):
                os.mknod(os.path.join(layer, name), stat.S_IFCHR, os.makedev(0, 0))
        cover(directory, layer)


def cover(directory: str, layer: str) -> None:
    """Puts a layer over a directory of the machine: what is changed there is changed in the layer only."""
    make(layer, 0o755)
    shutil.rmtree(layer + "-work", ignore_errors=True)  # of an earlier life of this host
    make(layer + "-work", 0o755)
    mount("overlay", directory, "overlay", 0, f"lowerdir={directory},upperdir={layer},workdir={layer}-work,volatile")


def fill_homes(base: str, host: dict[str, Any]) -> None:
    """Makes the users' homes where they are not there yet, and empties what a machine forgets when it starts anew."""
    for part, mode in host["parts"].items():
        make(os.path.join(base, part), mode)
    for part in ("tmp", "var-tmp"):
        for entry in os.scandir(os.path.join(base, part)):
            shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
    homes = [(os.path.join(base, "home", user["name"]), user["id"], 0o755, True) for user in host["users"]]
    homes.append((os.path.join(base, "root"), 0, 0o700, host["root_login"]))
    for home, owner, mode, login in homes:
        if login and not os.path.exists(home + "/.ssh"):
            make(home, mode, owner)
            make(home + "/.ssh", 0o700, owner)
            write(home + "/.ssh/authorized_keys", host["authorized"], 0o600, owner)


def write_etc(name: str, etc: str, host: dict[str, Any]) -> None:
    """Copies the machine's settings and puts in the host's own users, names and keys."""
    make(etc, 0o755)
    mount("tmpfs", etc, "tmpfs", 0, "mode=755")
    subprocess.run(["cp", "-a", "/etc/.", etc], check=True)
    people = [row for row in table("/etc/passwd") if int(row[2]) < 1000 or row[0] == "nobody"]
    if not any(row[0] == "sshd" for row in people):
        people.append(["sshd", "x", "990", "65534", "", "/run/sshd", "/usr/sbin/nologin"])
    groups = [row for row in table("/etc/group") if int(row[2]) < 1000 or row[0] == "nogroup"]
    for user in host["users"]:
        who, number = user["name"], str(user["id"])
        people.append([who, "x", number, number, "", f"/home/{who}", "/bin/bash"])
        groups.append([who, "x", number, ""])
    passwords = [[row[0], "*", "19000", "0", "99999", "7", "", "", ""] for row in people]
    for file, rows, mode in (("passwd", people, 0o644), ("group", groups, 0o644), ("shadow", passwords, 0o600)):
        put(etc, file, "".join(":".join(row) + "\n" for row in rows), mode)
    put(etc, "hostname", name + "\n")
    # As Debian does it: a host's own name leads to its loopback, and no name leads to another host.
    put(etc, "hosts", f"127.0.0.1 localhost\n127.0.1.1 {name}\n::1 localhost ip6-localhost\n")
    put(etc, "resolv.conf", "nameserver 127.0.0.1\n")  # refuses at once, where an unreachable one would be waited for
    for path in glob.glob(etc + "/ssh/ssh_host_*"):
        os.unlink(path)
    with open(host["host_key"]) as key:
        put(etc, "ssh/ssh_host_ed25519_key", key.read(), 0o600)
    put(etc, "ssh/sshd_config", host["sshd_config"])
    if host["sudo"]:
        os.makedirs(etc + "/sudoers.d", exist_ok=True)
        put(etc, "sudoers.d/test", f"{host['users'][0]['name']} ALL=(ALL) NOPASSWD: ALL\n", 0o440)


def start_sshd(host: dict[str, Any]) -> None:
    """Starts the host's sshd and returns when it takes connections."""

    def limit() -> None:
        for name, value in host["limits"].items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (value, value))

    path = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    argv = ["/usr/sbin/sshd", "-D", "-E", "/run/sshd.log", "-f", "/etc/ssh/sshd_config"]
    null = subprocess.DEVNULL
    sshd = subprocess.Popen(argv, env=path, stdin=null, stdout=null, preexec_fn=limit, start_new_session=True)
    while not listens(host["port"]):
        if sshd.poll() is not None:
            with open("/run/sshd.log") as log:
                raise RuntimeError(f"sshd ended with {sshd.returncode}: {log.read()}")
        time.sleep(0.005)


def listens(port: int) -> bool:
    with open("/proc/net/tcp") as sockets:
        rows = [row.split() for row in sockets]
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


def hold(path: str) -> int:
    return os.open(path, os.O_PATH)


def make(path: str, mode: int, owner: int = 0) -> None:
    os.makedirs(path, exist_ok=True)
    os.chmod(path, mode)
    os.chown(path, owner, owner)


def write(path: str, text: str, mode: int, owner: int = 0) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    os.chmod(path, mode)
    os.chown(path, owner, owner)


def put(etc: str, name: str, text: str, mode: int = 0o644) -> None:
    """Replaces a file of the copied settings; where a link was, there is a file after it."""
    path = os.path.join(etc, name)
    if os.path.lexists(path):
        os.unlink(path)
    write(path, text, mode)


def table(path: str) -> list[list[str]]:
    with open(path) as file:
        return [row.rstrip("\n").split(":") for row in file if row.strip()]
