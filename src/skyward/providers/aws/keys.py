"""The pool's key pair at AWS, and the setup steps on its machines."""

from __future__ import annotations

from skyward.api.shell import Shell, SshTarget
from skyward.errors import CloudRefused
from skyward.machines.cloud import PoolKeys, Terms, replace_host_key, resource_name
from skyward.machines.ledger import Ledger
from skyward.providers.aws.api import Api, filters, specification

__all__ = [
    "FABRIC",
    "LOCAL_DISK",
    "ensure_key",
    "prepare",
    "settle",
]


_SUDO = "Name a user of the image who may use sudo without a password: sky.AWS(username=...)."


def ensure_key(api: Api, ledger: Ledger, terms: Terms, keys: PoolKeys) -> str:
    name = resource_name(terms.pool)
    if ledger.history.left("key-pair"):
        return name
    call = ledger.intent("key-pair", region=api.account.region, name=name)
    try:
        api.call(
            "ec2",
            "import_key_pair",
            KeyName=name,
            PublicKeyMaterial=keys.login_public.encode(),
            TagSpecifications=specification(["key-pair"], terms.tags),
        )
    except CloudRefused as exc:
        # A duplicate is our own, of which the first answer was lost, if it is our key; its tags prove nothing.
        if exc.kind != "duplicate" or not _is_ours(api, terms, keys.login_public):
            if not exc.unanswered:
                ledger.refused(call, "key-pair", exc.code)
            raise
    ledger.answer(call, "key-pair", name, region=api.account.region)
    return name


def _is_ours(api: Api, terms: Terms, public: str) -> bool:
    requested = filters(pool=terms.pool, key_name=resource_name(terms.pool))
    found = api.pages("ec2", "describe_key_pairs", "KeyPairs", Filters=requested, IncludePublicKey=True)
    return any(str(key.get("PublicKey", "")).split()[:2] == public.split()[:2] for key in found)


# What is done on a machine before it is set up, local disks and EFA, and what is waited for: the fabric manager.
#
# Nothing of it is in the user data: a machine on which it fails still lets us in, and says why.


_ROOT = """\
root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }
"""

# Prints the directory on a local disk that is ours, if the machine has such a disk; $1 is the id of the machine.
LOCAL_DISK = f"""{_ROOT}
dev=${{2:-/dev/disk/by-id}} base=${{3:-/opt/dlami}} own=${{4:-/mnt/skyward}} tag=${{5:-/sys/devices/virtual/dmi/id}}
set -e
# No disk of any other computer is ever formatted, wherever this is run: EC2 machines know their id.
[ "$(cat "$tag/board_asset_tag" 2>/dev/null)" = "$1" ] || exit 0
set -- "$dev"/nvme-Amazon_EC2_NVMe_Instance_Storage_*
[ -e "$1" ] || exit 0
cache=$HOME/.cache/skyward
place=
if [ -d "$base" ]; then
  # AWS's own images mount them, soon after boot
  for _ in $(seq 100); do mountpoint -q "$base/nvme" && break; sleep 0.2; done
  mountpoint -q "$base/nvme" || {{ echo "$base/nvme is not mounted" >&2; exit 1; }}
  place=$base/nvme
elif mountpoint -q "$own"; then
  place=$own
else
  for disk; do
    disk=$(readlink -f "$disk")
    # never one that somebody has put something on, or uses
    ! root blkid -p "$disk" >/dev/null 2>&1 && [ -z "$(lsblk -nro MOUNTPOINT "$disk" | tr -d '\\n')" ] || continue
    root mkfs.ext4 -q -F -m 0 -E lazy_itable_init=1,lazy_journal_init=1 "$disk"
    root mkdir -p "$own"
    root mount -o nosuid,nodev,noatime "$disk" "$own"
    place=$own
    break
  done
fi
[ -n "$place" ] || exit 0
ours=$place/skyward-$(id -un)
root install -d -o "$(id -u)" -g "$(id -g)" -m 700 "$ours"
mkdir -p "$ours/cache" "$ours/tmp"
# What the image brings stays: an environment that is there already is quicker than any disk.
if [ -z "${{SKYWARD_CACHE:-}}" ] && ! mountpoint -q "$cache" && [ -z "$(ls -A "$cache/envs" 2>/dev/null)" ]; then
  mkdir -p "$cache"
  chmod 700 "$ours/cache"
  root mount --bind "$ours/cache" "$cache"
fi
echo "$ours"
"""

# NCCL looks for its plugin where the linker does; EFA's installer leaves that to the user.
_EFA = """\
if [ -d /opt/amazon/ofi-nccl/lib ] && [ -n "$(ls -A /sys/class/infiniband 2>/dev/null)" ] &&
  ! ldconfig -p | grep -q libnccl-net.so; then
  find /opt/amazon/ofi-nccl/lib /opt/amazon/efa/lib* -name '*.so' -printf '%h\\n' 2>/dev/null | sort -u |
    root tee /etc/ld.so.conf.d/skyward-efa.conf >/dev/null && root ldconfig
fi
"""

FABRIC = """\
# Waits until the GPUs of a machine with NVSwitches can reach each other; before, CUDA fails with error 802.
kind=$(cat "${1:-/sys/devices/virtual/dmi/id/product_name}" 2>/dev/null) || exit 0
case $kind in p4d.* | p4de.* | p5.48* | p5e.* | p5en.* | p6-*) ;; *) exit 0 ;; esac
unit=nvidia-fabricmanager
state=
for _ in $(seq "${2:-180}"); do
  state=$(systemctl is-active $unit 2>/dev/null)
  case $state in
    active)
      nvidia-smi --query-gpu=fabric.state --format=csv,noheader 2>/dev/null |
        grep -qi 'in progress\\|not started' || exit 0
      state='active, but the fabric is not ready' ;;
    failed) break ;;
  esac
  sleep 1
done
echo "$unit is ${state:-not there}" >&2
systemctl status --no-pager --lines=1 $unit 2>/dev/null | tail -n 1 >&2
exit 1
"""


def prepare(shell: Shell, id: str) -> tuple[dict[str, str], str | None]:
    """Mounts the local disk for temporary files; returns what failed."""
    done = shell.run(["sh", "-c", _ROOT + _EFA + LOCAL_DISK, "sh", id], timeout=60)
    if done.code != 0:
        return {}, f"the machine's local disk is not used: {_last(done.err)}. Environments are on its root disk"
    ours = done.out.decode("utf-8", "replace").strip()
    return ({"TMPDIR": f"{ours}/tmp"} if ours else {}), None


def settle(shell: Shell, target: SshTarget) -> str | None:
    """Replaces the host key and waits for what GPUs need; returns what failed."""
    kept = replace_host_key(shell, target, hint=_SUDO)
    done = shell.run(["sh", "-c", FABRIC], timeout=300)
    if done.code == 0:
        return kept
    fabric = (
        f"GPUs of this machine cannot be used together: {_last(done.err)}. CUDA says error 802 there. Look at "
        "`journalctl -u nvidia-fabricmanager` on the machine, or use AWS's own image"
    )
    return f"{kept} {fabric}" if kept else fabric


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[-2:]) or "no reason given"
