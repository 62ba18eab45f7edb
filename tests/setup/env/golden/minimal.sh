#!/bin/sh
# Sets a host up for Skyward; safe to run again after it was cut off anywhere.
python_version=3.11
apt=''
tools=''
strict='--no-deps --require-hashes --only-binary :all:'
uv_version=0.0.0
uv_oldest=0.12
misleading='VIRTUAL_ENV CONDA_PREFIX PYTHONHOME PYTHONPATH UV_NO_SOURCES UV_PROJECT UV_WORKING_DIR UV_WORKING_DIRECTORY'
# Makes the environment of an image on a host.
# Run as: sh setup.sh STAGE TOKEN POOL KEY NEED [hold]
#   STAGE  the directory with the files that were sent; removed      TOKEN  what marks the lines printed here
#   POOL   the name of the pool                                      KEY    the name of the environment
#   NEED   the kilobytes that must be free
#   hold   settings come on standard input, after their number of lines; when it is closed, everything here is ended
stage=$1 token=$2 pool=$3 key=$4 need=$5 hold=${6:-}
# What look.sh and setup.sh share: where the cache is, how they report, checks of the host.
umask 077
cache=${SKYWARD_CACHE:-${HOME:-}/.cache/skyward}
case $cache in /*) ;; *) cache=$PWD/$cache ;; esac
while [ "$cache" != "${cache%/}" ]; do cache=${cache%/}; done
problems=
newline='
'

# One line for the program that started this; the token tells it from other output.
say() { printf '@%s %s\n' "$token" "$*"; }

problem() {
    problems="$problems $1"
    say "problem $*"
}

status_of() {
    case $1 in
        system) echo 20 ;; home) echo 21 ;; owner) echo 22 ;; noexec) echo 23 ;; disk) echo 24 ;;
        files) echo 25 ;; processes) echo 26 ;; tool) echo 27 ;; apt) echo 28 ;; sudo) echo 29 ;;
        uv) echo 30 ;; python) echo 31 ;; network) echo 32 ;; packages) echo 33 ;; *) echo 1 ;;
    esac
}

# The platform as uv calls it; coarse, so that similar hosts get the same packages.
find_platform() {
    case $(uname -sm) in
        'Linux x86_64' | 'Linux amd64') platform=x86_64 ;;
        'Linux aarch64' | 'Linux arm64') platform=aarch64 ;;
        *) platform= && return ;;
    esac
    minor=$(getconf GNU_LIBC_VERSION 2>/dev/null) || minor=
    minor=${minor#glibc 2.}
    minor=${minor%%.*}
    set -- /lib/ld-musl-*
    case $minor in
        '' | *[!0-9]*) if [ -e "$1" ]; then platform=$platform-unknown-linux-musl; else platform=$platform-manylinux_2_17; fi ;;
        ? | 1?) platform=$platform-manylinux_2_17 ;;
        2[0-7]) platform=$platform-manylinux_2_17 ;;
        2? | 3[0-3]) platform=$platform-manylinux_2_28 ;;
        *) platform=$platform-manylinux_2_34 ;;
    esac
}

is_complete() { [ -s "$env/.complete" ] && [ -x "$env/bin/python" ]; }

# Whether only this user can have put files into the cache: nobody else can write into it, and at no level above it can
# anybody else put another directory in its place, or has made the link that leads to it.
is_own() {
    # A pod's volumes are open to all users, of which it has one.
    for own in ${SKYWARD_OWN:-}; do
        case $cache/ in "$own"/*) [ ! -O "$cache" ] || return 0 ;; esac
    done
    others="! -user $(id -u) ! -user 0" groups='! -group 0'
    # A group that has the user's name is the user's own, as on Debian.
    [ "$(id -gn 2>/dev/null)" != "$(id -un 2>/dev/null)" ] || groups="$groups ! -group $(id -g)"
    # shellcheck disable=SC2086 # it is split into words on purpose
    [ -O "$cache" ] && [ -z "$(find "$cache/." -prune \( -perm -0002 -o -perm -0020 $groups \) 2>/dev/null)" ] || return
    real=$(cd -P "$cache" 2>/dev/null && pwd -P) || return
    set --
    for above in "$cache" "$real"; do
        while above=${above%/*} && [ -n "$above" ]; do set -- "$@" "$above"; done
    done
    # shellcheck disable=SC2086 # as above
    [ -z "$(find / "$cache" "$@" -prune \( $others -o -type d ! -perm -1000 \( -perm -0002 -o -perm -0020 $groups \) \) 2>/dev/null)" ]
}

# A uv that runs here and is new enough.
find_uv() {
    for uv in "$cache/bin/uv-$uv_version" uv "${HOME:-}/.local/bin/uv"; do
        # shellcheck disable=SC2046 # it is split into words on purpose
        set -- $("$uv" --version 2>/dev/null)
        case ${2:-} in [0-9]*.[0-9]*.[0-9]*) ;; *) continue ;; esac
        major=${2%%.*} minor=${2#*.}
        minor=${minor%%.*}
        [ "$major" -gt "${uv_oldest%.*}" ] && return
        [ "$major" -eq "${uv_oldest%.*}" ] && [ "$minor" -ge "${uv_oldest#*.}" ] && return
    done
    return 1
}

# The names in /proc are the same for every shell; ulimit's options are not.
check_limits() {
    [ -r /proc/self/limits ] || return 0
    while IFS= read -r line; do
        # shellcheck disable=SC2086 # it is split into words on purpose
        case $line in
            'Max open files'*) set -- $line && low files "$5" 4096 'open files' nofile ;;
            'Max processes'*) set -- $line && low processes "$4" 256 processes nproc ;;
        esac
    done </proc/self/limits
}

low() {
    [ "$2" = unlimited ] || [ "$2" -ge "$3" ] ||
        problem "$1" "this user may have no more than $2 $4 at once; a node needs $3. Raise $5 in /etc/security/limits.conf."
}

free_kb() { df -Pk "$1" 2>/dev/null | sed -n '$s/.* \([0-9][0-9]*\)  *[0-9][0-9]*% .*/\1/p'; }

# What a host must have before anything is copied to it; everything that is missing is reported at once.
preflight() {
    [ -n "$platform" ] ||
        problem system "this is $(uname -sm); a host needs Linux on x86_64 or aarch64."
    for tool in $tools; do
        command -v "$tool" >/dev/null 2>&1 || problem tool "there is no $tool. Install it."
    done
    check_apt
    check_room && check_place "$cache"
}

# Whether there is room for the cache; $there is the part of its path that exists.
check_room() {
    there=$cache
    until [ -d "$there" ]; do there=${there%/*} && [ -n "$there" ] || there=/; done
    free=$(free_kb "$there")
    [ "${free:-$need}" -ge "$need" ] || {
        problem disk "$there has $((free / 1024)) MB free; $((need / 1024)) MB are needed. Make room, or set SKYWARD_CACHE to a directory on another disk."
        return 1
    }
}

# Whether files can be made and run in the cache, by this user alone; messages call it $1.
check_place() {
    probe=$(mkdir -p "$cache" 2>&1 && mktemp "$cache/.probe-XXXXXX" 2>&1) || {
        problem home "$1 cannot be written to (${probe##*: }). Make it writable, or set SKYWARD_CACHE to a directory that is."
        return
    }
    is_own || {
        rm -f "$probe"
        problem owner "$1 belongs to another user, or others can write into it or replace it, and what lies there is run. Set SKYWARD_CACHE to a directory that is yours alone."
        return
    }
    printf '#!/bin/sh\n' >"$probe"
    chmod 700 "$probe"
    "$probe" 2>/dev/null ||
        problem noexec "programs in $1 cannot be run: its file system is mounted noexec. Set SKYWARD_CACHE to a directory on another one."
    rm -f "$probe"
}

# Which of the image's system packages are missing, and whether we can install them: with apt, or dnf where there is no apt.
check_apt() {
    missing='' sudo='' installer='apt-get install --yes'
    [ -n "$apt" ] || return 0
    if command -v dpkg-query >/dev/null 2>&1 && command -v apt-get >/dev/null 2>&1; then
        missing_debian
    elif command -v dnf >/dev/null 2>&1 && command -v rpm >/dev/null 2>&1; then
        installer='dnf install --assumeyes'
        missing_rpm
    else
        problem apt "there is neither apt nor dnf here to install $apt. Install them with this host's own package manager and leave apt out of the image."
        return
    fi
    [ -z "$missing" ] || [ "$(id -u)" = 0 ] || {
        sudo='sudo -n'
        $sudo true 2>/dev/null ||
            problem sudo "it lacks$missing, and this user may not use sudo without a password. Run there: sudo $installer$missing"
    }
}

missing_debian() {
    for wanted in $apt; do
        version=
        case $wanted in *=*) version="${wanted#*=}$newline" ;; esac
        # shellcheck disable=SC2016 # the braces are dpkg-query's
        found=$(dpkg-query --show --showformat='${db:Status-Status} ${Version}\n' "${wanted%%=*}" 2>/dev/null) || found=
        case $newline$found$newline in *"${newline}installed $version"*) ;; *) missing="$missing $wanted" ;; esac
    done
}

# A version that is given is Debian's: no other distribution has it.
missing_rpm() {
    for wanted in $apt; do
        case $wanted in
            *=*) problem apt "$wanted names a version of Debian's, and this host has dnf. Leave the version out, or install it with this host's own package manager." ;;
            *) rpm --query --whatprovides "$wanted" >/dev/null 2>&1 || missing="$missing $wanted" ;;
        esac
    done
}
env=$cache/envs/$key log=$cache/logs/$key-$$.log host=$(uname -n)
work='' lock='' directory='' watcher='' pulse='' meter='' settings=''

# Hundredths of a second since the host was booted.
tick() {
    read -r clock _ </proc/uptime
    clock=${clock%.*}${clock#*.}
    clock=${clock#"${clock%%[!0]*}"}
}

begin() {
    step=$1
    tick
    began=$clock
    say "begin $step"
}

end() {
    tick
    say "end $(((clock - began) * 10)) $step"
}

fail() {
    problem "$@"
    [ ! -f "$log" ] || tail -n 20 "$log" | while IFS= read -r line; do say "| $line"; done
    say "log $log"
    exit "$(status_of "$1")"
}

# Why a step that installs something failed.
failed_install() {
    if tail -n 40 "$log" | grep -q 'No space left on device'; then
        fail disk "the disk became full: $(free_kb "$cache") KB are free in $cache. Make room, or set SKYWARD_CACHE to a directory on another disk."
    elif tail -n 40 "$log" | grep -Eq 'Request failed after|error sending request|dns error|operation timed out|Connection (refused|reset)|Curl error'; then
        fail network "a server of packages could not be reached, also when tried again. Look at the host's network and proxy settings."
    fi
    fail "$1" "$2"
}

# Runs a program with the settings from standard input. They may be secret: they are in no file and on no command line.
tool() { (eval "$settings" && exec "$@") >>"$log" 2>&1 </dev/null; }

# Programs that install packages, and what they build, get no secret that this host's sessions have.
hide_secrets() {
    names=$(export -p | sed -n -e 's/^export \([A-Za-z_][A-Za-z0-9_]*\)=.*/\1/p' -e 's/^declare -x \([A-Za-z_][A-Za-z0-9_]*\)=.*/\1/p' |
        grep -iE 'token|secret|passw|passphrase|credential|(^|_)(auth|pat|pwd|dsn|jwt)(_|$)|key(_|$)|cookie' |
        grep -vE '^(PWD|OLDPWD|SSH_AUTH_SOCK)$|^UV_INDEX_|^GIT_CONFIG_')
    [ -z "$names" ] || unset $names
}

# Ends everything that was started here when standard input is closed, that is, when the client is gone.
watch() {
    while IFS= read -r line; do :; done
    trap '' TERM
    kill -TERM 0
    left=50
    while kill -0 $$ 2>/dev/null && [ "$left" -gt 0 ]; do
        sleep 0.1 2>/dev/null || { sleep 1 && left=$((left - 9)); }
        left=$((left - 1))
    done
    kill -KILL 0
}

# Kilobytes that the host has received, and that its disk has taken.
moved() {
    total=0
    while read -r name bytes _; do
        case $name in lo:) ;; *:) total=$((total + bytes / 1024)) ;; esac
    done </proc/net/dev
    free=$(free_kb "$cache")
    echo $((total - ${free:-0}))
}

# Says every few seconds whether a download or an installation is getting anywhere.
measure() {
    before=$(moved)
    while sleep 2 </dev/null >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        after=$(moved)
        [ $((after - before)) -lt 200 ] || say progress
        before=$after
    done
}

clean() {
    code=$?
    trap '' HUP INT TERM
    # After a SIGTERM the watcher still has to kill processes that ignore it.
    [ -z "$watcher" ] || [ "$code" = 143 ] || kill -KILL "$watcher" 2>/dev/null
    [ -z "$pulse" ] || kill "$pulse" 2>/dev/null
    [ -z "$meter" ] || kill "$meter" 2>/dev/null
    [ -z "$lock" ] || rm -f "$lock" "$lock-held"
    [ -z "$work" ] || rm -rf "$work"
    [ "$code" = 0 ] || [ -z "$directory" ] || rm -rf "$directory"
    case $stage in "$cache/stage/"?*) rm -rf "$stage" ;; esac
    trap - EXIT
    exit "$code"
}

install_apt() {
    installing='installing apt packages' patience=$(eval "$settings" && echo "${SKYWARD_APT_WAIT:-600}")
    begin "$installing"
    options='-o DPkg::Lock::Timeout=0 -o Acquire::Retries=3'
    quiet='env DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a LC_ALL=C'
    # An interrupted installation has to be finished before anything else can be installed.
    patiently $sudo $quiet dpkg --configure -a &&
        patiently $sudo $quiet apt-get $options update &&
        patiently $sudo $quiet apt-get $options install --yes --no-install-recommends $missing ||
        failed_install apt "apt-get could not install$missing."
    end
}

# dnf waits by itself for others that use it, and reads its package lists when they are old.
install_dnf() {
    begin 'installing packages with dnf'
    seen=$(wc -c <"$log")
    tool $sudo env LC_ALL=C dnf --assumeyes --setopt=install_weak_deps=False install $missing || {
        unknown=$(tail -c "+$((seen + 1))" "$log" | sed -n 's/.*No match for argument: *\([^ ]*\).*/ \1/p' | tr -d '\n')
        [ -z "$unknown" ] ||
            fail apt "dnf knows no package$unknown. This host is no Debian, and its packages may have other names (libx-dev is libx-devel): give those that it has, as in Image(apt=[\"libx-devel\"]), or put them into the machine's image."
        failed_install apt "dnf could not install$missing."
    }
    end
}

# Runs a program that needs apt's locks. Whoever holds one is named and waited for: after its first boot, Ubuntu installs
# updates by itself.
patiently() {
    blocked='' told=''
    while seen=$(wc -c <"$log") && ! tool "$@"; do
        find_holder "$(tail -c "+$((seen + 1))" "$log")" || return 1
        tick
        [ -n "$blocked" ] || blocked=$clock
        [ $((clock - blocked)) -lt $((patience * 100)) ] ||
            fail apt "$holder has held apt's lock $held for $patience s. Try again when it is done, or wait longer for it: Image(shell_vars={\"SKYWARD_APT_WAIT\": \"1800\"})."
        [ "$told" = "$holder $held" ] || begin "waiting for $holder, which holds apt's lock $held"
        told="$holder $held"
        sleep 1
    done
    [ -z "$blocked" ] || { end && begin "$installing"; }
}

# Who holds which lock, by what apt or dpkg has said of it; fails if it was about something else.
find_holder() {
    blamed=$(printf '%s\n' "$1" | grep -Em1 'Could not get lock|lock(ed)? .*by another process') || return 1
    case $blamed in
        *' lock /'*) held=/${blamed#* lock /} held=${held%% *} held=${held%.} ;;
        *frontend*) held=/var/lib/dpkg/lock-frontend ;;
        *) held=/var/lib/dpkg/lock ;;
    esac
    pid=${blamed##*process } pid=${pid##*pid } pid=${pid%% *}
    case $pid in '' | *[!0-9]*) holder='another program' && return ;; esac
    holder=$(tr '\0\n' '  ' <"/proc/$pid/cmdline" 2>/dev/null)
    holder="process $pid (${holder% })"
}

get_uv() {
    begin 'looking for uv'
    kept=$cache/bin/uv-$uv_version
    [ ! -f "$stage/uv" ] || { chmod 700 "$stage/uv" && mv -f "$stage/uv" "$kept"; }
    find_uv || {
        # The hash of uv is among those of the packages.
        grep -E '^uv( @|==)' "$stage/requirements.txt" >"$stage/uv.txt"
        tool "${SKYWARD_PYTHON:-python3}" -m venv "$stage/venv" &&
            tool "$stage/venv/bin/python" -m pip install --no-deps --only-binary :all: --require-hashes -r "$stage/uv.txt" &&
            mv -f "$stage/venv/bin/uv" "$kept" && find_uv ||
            failed_install uv "there is no uv $uv_oldest or newer here, and python3 with pip could not install it."
    }
    end
}

find_python() {
    begin "looking for Python $python_version"
    found=$(find_installed_python) || { [ -f python.tar.gz ] && unpack_python && found=$(find_installed_python); } || {
        tool "$uv" python install --no-bin "$python_version" && found=$(find_installed_python) ||
            fail python "this host has no Python $python_version that works$(others), and uv could not install it. Functions can only go to the same minor version: install it there (python$python_version on the PATH), or let the host reach the servers of uv (UV_PYTHON_INSTALL_MIRROR)."
    }
    end
}

# The client sends one to hosts that can get none.
unpack_python() {
    place=$UV_PYTHON_INSTALL_DIR
    mkdir -p "$place" sent && tool tar -xzf python.tar.gz -C sent || failed_install python "the Python that was sent could not be unpacked."
    for made in sent/*; do
        [ -e "$place/${made##*/}" ] || mv "$made" "$place/"
    done
}

# SKYWARD_PYTHON is set where a cluster's settings, or the client's own path, name one.
find_installed_python() {
    for candidate in "${SKYWARD_PYTHON:-}" "$("$uv" python find --no-project --no-python-downloads --system "cpython@$python_version" 2>>"$log")"; do
        "${candidate:-false}" -I -c 'import ctypes, ssl, sys; sys.exit((sys.implementation.name, "%d.%d" % sys.version_info[:2]) != ("cpython", sys.argv[1]))' "$python_version" >>"$log" 2>&1 && printf '%s' "$candidate" && return
    done
    return 1
}

# The versions that the host has, for people.
others() {
    set -- $("$uv" python list --only-installed --no-project 2>/dev/null | sed -n 's/^[a-z]*-\([0-9.]*\).*/\1/p' | sort -u)
    [ $# -eq 0 ] || printf ' (it has %s)' "$(printf '%s, ' "$@" | sed 's/, $//')"
}

# Whether the process HOST-PID that made something is gone; on another host with the same directory, its pulse tells.
is_gone() {
    case $1 in
        "$host-"*) ! grep -qsF -e "$cache/stage/" "/proc/${1##*-}/cmdline" ;;
        *) [ -z "$(find "$env.lock-held" -mmin -2 2>/dev/null)" ] && [ -n "$(find "$2" -prune -mmin +2 2>/dev/null)" ] ;;
    esac
}

# One process at a time makes an environment; the target of the link says which.
take_lock() {
    tries=0
    until ln -s "$host-$$" "$env.lock" 2>/dev/null; do
        if [ ! -L "$env.lock" ]; then
            tries=$((tries + 1))
            [ "$tries" -lt 5 ] || fail home "$env.lock cannot be made. Look at the permissions and the free space there."
        elif is_gone "$(readlink "$env.lock")" "$env.lock"; then
            rm -f "$env.lock"
        else
            [ "$step" = waiting ] || begin 'waiting for another process that makes the same environment'
            step=waiting
            sleep 1
        fi
    done
    lock=$env.lock
    while kill -0 $$ 2>/dev/null && touch "$lock-held"; do sleep 2; done </dev/null >/dev/null 2>&1 &
    pulse=$!
    for left in "$env".tmp-*; do
        ! is_gone "${left#"$env".tmp-}" "$left" || rm -rf "$left"
    done
}

# Made beside its place and moved there in one step, so that nobody sees half of it.
make_environment() {
    begin 'making the environment'
    [ ! -e "$env" ] || rm -rf "$env"
    work=$env.tmp-$host-$$
    tool "$uv" venv --relocatable --no-project --python "$found" "$work" ||
        failed_install packages "uv could not make an environment."
    end
    begin 'installing packages'
    # What a build needs does not come from an index that has to be named.
    set -- "$uv" pip install --python "$work/bin/python" --compile-bytecode $strict --build-constraints build.txt -r pyproject.toml -r requirements.txt
    # First without the network: that is fast if everything is cached, and works if there is no network.
    # uv itself tries three more times, with pauses, if a server does not answer.
    tool "$@" --offline || tool "$@" || failed_install packages "uv could not install the packages."
    cp packages.txt "$work/packages.txt"
    printf '%s\n' "$key" >"$work/.complete"
    "$work/bin/python" -I -c 'import os, sys; os.rename(*sys.argv[1:])' "$work" "$env" 2>>"$log" || is_complete ||
        failed_install packages "$work could not be moved to $env."
    work=
    end
    forget
}

# Removes what has not been used for a month, unless pools are here that may use it.
forget() {
    set -- "$cache"/pools/*
    [ ! -e "$1" ] || return 0
    find "$cache/envs" -mindepth 2 -maxdepth 2 -name .complete -mtime +30 | while IFS= read -r old; do rm -rf "${old%/*}"; done
    find "$cache/wheels" "$cache/logs" -mindepth 1 -maxdepth 1 -mtime +30 -exec rm -rf {} +
}

hide_secrets
trap clean EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
cd "$stage" || exit 1
if [ "$hold" = hold ]; then
    read -r left || exit 129
    while [ "$left" -gt 0 ]; do
        IFS= read -r line || exit 129
        settings=$settings$line$newline left=$((left - 1))
    done
    exec 3<&0 </dev/null
    watch <&3 3<&- >/dev/null 2>&1 &
    watcher=$!
    exec 3<&-
    measure 2>/dev/null &
    meter=$!
fi

begin 'checking the host'
find_platform
check_limits
preflight
[ -z "$problems" ] || { set -- $problems && exit "$(status_of "$1")"; }
mkdir -p "$cache/envs" "$cache/bin" "$cache/wheels" "$cache/pools" "$cache/logs"
chmod 700 "$cache/envs" "$cache/bin" "$cache/wheels" "$cache/pools" "$cache/logs"
: >"$log"
end
if ! is_complete; then
    [ -z "$missing" ] || case $installer in dnf*) install_dnf ;; *) install_apt ;; esac
    # VIRTUAL_ENV and the like would lead uv to another environment.
    unset $misleading
    export UV_NO_PROGRESS=1 NO_COLOR=1
    # Certificates that the host's administrator has added count, as for its other programs.
    for store in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/cert.pem; do
        [ ! -s "$store" ] || export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}"
    done
    export UV_CACHE_DIR="${UV_CACHE_DIR:-$cache/uv}" UV_PYTHON_INSTALL_DIR="${UV_PYTHON_INSTALL_DIR:-$cache/python}"
    # Each is named by its hash, a comma and its name.
    for sent in *,*; do
        [ ! -e "$sent" ] || { mkdir -p "$cache/wheels/${sent%%,*}" && mv -f "$sent" "$cache/wheels/${sent%%,*}/${sent#*,}"; }
    done
    get_uv
    take_lock
    is_complete || { find_python && make_environment; }
fi
directory=$(mktemp -d "$cache/pools/$pool-XXXXXX") || fail home "no directory could be made in $cache/pools."
[ -z "$watcher" ] || { kill -KILL "$watcher" && wait "$watcher"; } 2>/dev/null
watcher=
say "ready $env	$directory	$cache"
