"""What a machine is told at its first boot: by which key it is known, and when it ends itself."""

from __future__ import annotations

import json
from math import ceil
from string import Template

from skyward.errors import InvalidArgument

__all__ = ["LEASE_FILE", "lease_script", "user_data"]

LEASE_FILE = "/run/skyward/lease"
"""Touching it renews the lease."""
_MOST = 16 * 1024

# Counts the machine's own seconds, so that a clock set right after boot ends nothing; sh and nothing else.
_SCRIPT = Template("""\
#!/bin/sh
# Ends this machine when nobody has renewed its lease for $lease s, or when it is $life s old.
# Renew it with: touch $file
file=$file lease=$lease life=$life
dir=$${file%/*}
now() { cut -d. -f1 /proc/uptime; }
mkdir -p "$$dir" && chmod 755 "$$dir"
[ -e "$$file" ] || (umask 0 && : > "$$file")
[ -s "$$dir/started" ] || now > "$$dir/started"
started=$$(cat "$$dir/started")
seen=$$(now)
last=
while :; do
  stamp=$$(stat -c %y "$$file" 2>/dev/null)
  time=$$(now)
  if [ "$$stamp" != "$$last" ]; then last=$$stamp; seen=$$time; fi
  if [ $$((time - seen)) -ge "$$lease" ] || [ $$((time - started)) -ge "$$life" ]; then
    shutdown -P now || systemctl poweroff || poweroff
  fi
  sleep $step
done
""")

# First of all things at boot: a unit of its own that systemd restarts, and a timer that needs no loop; where there is
# no systemd, a process of its own session. Neither unit has default dependencies: those wait for sysinit.target, which
# waits for cloud-init, which waits for this; the machine would never finish its boot.
_ARM = Template("""\
mkdir -p /run/skyward && cat > /run/skyward/lease.sh <<'END_OF_LEASE'
$script
END_OF_LEASE
if command -v systemd-run >/dev/null 2>&1 && [ -d /run/systemd/system ]; then
  systemd-run --no-block --unit=skyward-lease -p DefaultDependencies=no -p Restart=always -p OOMScoreAdjust=-1000 \\
    /bin/sh /run/skyward/lease.sh
  systemd-run --no-block --unit=skyward-life --on-active=$life --timer-property=DefaultDependencies=no \\
    /bin/sh -c 'shutdown -P now || systemctl poweroff'
else
  setsid sh /run/skyward/lease.sh </dev/null >/dev/null 2>&1 &
fi
""")


def lease_script(lease: float, life: float) -> str:
    """The program that ends the machine; independent of Python, of SSH and of us."""
    step = max(1, min(10, int(lease // 4)))
    return _SCRIPT.substitute(lease=ceil(lease), life=ceil(life), file=LEASE_FILE, step=step)


def user_data(host_private: str, host_public: str, lease: float, life: float) -> str:
    """Cloud-init's settings for a machine, as JSON, which is YAML too. Holds no secret but a throw-away host key."""
    arm = _ARM.substitute(script=lease_script(lease, life), life=ceil(life))
    settings = {
        "bootcmd": [["sh", "-c", arm]],
        "ssh_deletekeys": True,
        "ssh_keys": {"ed25519_private": host_private, "ed25519_public": host_public},
        "ssh_pwauth": False,
        "package_update": False,
        "package_upgrade": False,
    }
    text = "#cloud-config\n" + json.dumps(settings, indent=1) + "\n"
    if len(text.encode()) > _MOST:
        raise InvalidArgument(f"the user data has {len(text.encode())} bytes; AWS takes {_MOST}.")
    return text
