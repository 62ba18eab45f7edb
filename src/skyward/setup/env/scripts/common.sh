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
