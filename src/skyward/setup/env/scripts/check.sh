# Says what a host is, has and lacks, for `sky hosts check`; changes nothing there.
# Run as: sh check.sh TOKEN NEED TOOLS PYTHON
#   TOKEN  what marks the lines printed here      NEED  the kilobytes that must be free      TOOLS  programs it must have
#   PYTHON  the version that pools need
# On standard input: the addresses of package indexes, one a line, then an empty line; then orders:
#   time N      says N and what time it is here
#   python N    the next N bytes are a program of Python, which takes over
token=$1 need=$2 tools=$3 version=$4 apt=
. common.sh
named=$cache made=
trap '[ -z "$made" ] || rmdir "$made" 2>/dev/null' EXIT
trap 'exit 129' HUP INT TERM

# What it says is at most so long, whatever the host has.
short() { printf '%.300s' "$1"; }

limited() {
    if command -v timeout >/dev/null 2>&1; then timeout 20 "$@"; else "$@"; fi
}

tell_system() {
    find_platform
    libc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || libc='no glibc'
    distribution=$(sed -n 's/^PRETTY_NAME="\{0,1\}\([^"]*\)"\{0,1\}$/\1/p' /etc/os-release 2>/dev/null)
    say "system $(short "$(uname -srm)	$libc	$distribution")"
    say "platform $platform"
    say "user $(short "$(id -un 2>/dev/null || id -u)")"
    say "boot $(cat /proc/sys/kernel/random/boot_id 2>/dev/null)"
    say "cpus $(getconf _NPROCESSORS_ONLN 2>/dev/null)"
    say "load $(cut -d ' ' -f 1 /proc/loadavg 2>/dev/null)"
    say "memory $(sed -n -e 's/^MemTotal: *\([0-9]*\).*/\1/p' -e 's/^MemAvailable: *\([0-9]*\).*/\1/p' /proc/meminfo 2>/dev/null | tr '\n' ' ')"
}

# The cache is not made if it is not there: a directory beside it tells the same, and is removed again.
tell_disk() {
    say "shm $(free_kb /dev/shm)"
    check_room || return
    say "room ${free:-} $(short "$there")"
    if [ "$there" != "$cache" ]; then
        made=$(mktemp -d "$there/.skyward-XXXXXX" 2>&1) || {
            problem home "$named cannot be written to (${made##*: }). Make it writable, or set SKYWARD_CACHE to a directory that is."
            made=
            return
        }
        cache=$made
    fi
    check_place "$named"
    cache=$named
    [ -z "$made" ] || rmdir "$made" 2>/dev/null
    made=
}

# Pythons that a pool may use; the first that works runs our test of the network, as $python.
tell_pythons() {
    python=
    for found in "python$version" python3 "$cache/python"/*"/bin/python$version"; do try_python "$found"; done
    for found in "$cache"/envs/*/bin/python; do [ -n "$python" ] || try_python "$found"; done
    ! find_uv || say "uv $(short "$uv")"
}

try_python() {
    found=$(command -v "$1" 2>/dev/null) || return 0
    number=$("$found" -I -c 'import ctypes, ssl, sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || return 0
    say "python $number $(short "$found")"
    python=${python:-$found}
}

# Keepers of any user, as far as this user may see them; ours is told from others by the name of its user.
tell_pools() {
    for file in $(grep -lsF skyward.node.keeper /proc/[0-9]*/cmdline 2>/dev/null); do
        words=$({ tr '\0' '\n' <"$file"; } 2>/dev/null)
        printf '%s\n' "$words" | grep -qxF skyward.node.keeper || continue
        directory=$(printf '%s\n' "$words" | grep -m 1 '/pools/')
        # shellcheck disable=SC2012 # names of users have no spaces
        owner=$(ls -ld "${file%/*}" 2>/dev/null | tr -s ' ' | cut -d ' ' -f 3)
        say "pool $(short "$owner ${directory##*/}")"
    done
}

tell_gpus() {
    if command -v nvidia-smi >/dev/null 2>&1; then
        asked=$(limited nvidia-smi --query-gpu=name,memory.total,memory.used,driver_version --format=csv,noheader,nounits 2>&1 </dev/null)
        code=$?
        if [ "$code" = 0 ]; then
            printf '%s\n' "$asked" | head -n 32 | while IFS= read -r line; do say "gpu $(short "$line")"; done
        else
            say "gpu-failed $code $(short "$(printf '%s' "$asked" | tail -n 1)")"
        fi
    elif [ -e /proc/driver/nvidia/version ]; then
        say 'gpu-failed 127 there is an NVIDIA driver, and no nvidia-smi'
    fi
    [ ! -e /dev/kfd ] || say amd
}

# Whether logind ends what a user has started as soon as the connection is lost.
tell_logind() {
    [ -d /run/systemd/system ] || return 0
    ends=$(cat /usr/lib/systemd/logind.conf /etc/systemd/logind.conf /usr/lib/systemd/logind.conf.d/*.conf /etc/systemd/logind.conf.d/*.conf 2>/dev/null |
        sed -n 's/^KillUserProcesses=//p' | tail -n 1)
    stays=no
    [ ! -e "/var/lib/systemd/linger/$(id -un 2>/dev/null)" ] || stays=yes
    say "logind $(short "${ends:-no}") $stays"
}

tell_limits() {
    check_limits
    say "files $(sed -n 's/^Max open files  *[^ ]*  *\([^ ]*\).*/\1/p' /proc/self/limits 2>/dev/null)"
}

# A login in the address is of no use here: whether the server answers is the question.
try_index() {
    url=$(printf '%s' "$1" | sed 's|//[^/@]*@|//|')
    if command -v curl >/dev/null 2>&1; then
        answer=$(curl --silent --show-error --head --output /dev/null --connect-timeout 6 --max-time 10 -- "$url" 2>&1 </dev/null)
        code=$?
    elif [ -n "$python" ]; then
        answer=$("$python" -I -c 'import sys, urllib.request as u
try: print(u.urlopen(u.Request(sys.argv[1], method="HEAD"), timeout=8).status)
except u.HTTPError as e: print(e.code)' "$url" 2>&1 </dev/null)
        code=$?
    else
        say "index-unknown $(short "$url")"
        return
    fi
    if [ "$code" = 0 ]; then say "index-ok $(short "$url")"; else
        say "index-failed $(short "$url	$(printf '%s' "$answer" | tail -n 1)")"
    fi
}

indexes=
while IFS= read -r line && [ -n "$line" ]; do indexes=$indexes$line$newline; done
own=${UV_DEFAULT_INDEX:-${UV_INDEX_URL:-}}
[ -z "$own" ] || indexes=$own$newline$(printf '%s' "$indexes" | sed 1d)
tell_system
for tool in $tools; do
    command -v "$tool" >/dev/null 2>&1 || problem tool "there is no $tool. Install it."
done
say "cache $(short "$cache")"
tell_limits
tell_pythons
printf '%s\n' "$indexes" | while IFS= read -r line; do [ -z "$line" ] || try_index "$line"; done &
tell_disk
tell_pools
tell_gpus
tell_logind
wait
say "done $python"
while read -r word rest; do
    case $word in
        time) say "time $rest $(date +%s.%N)" ;;
        python) exec "$python" -I -c 'import sys; exec(sys.stdin.buffer.read(int(sys.argv[1])))' "$rest" ;;
    esac
done
