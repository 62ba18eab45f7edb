# Says what a host is and has; gives the pool a directory if the environment is there.
token=$1 pool=$2 need=$3 apt=$4 tools=$5
shift 5
. common.sh

find_platform
say "platform $platform"
say "path ${PATH:-}"
say "cache $cache"

# The environments that can be used are given as platform=key.
key=none
for pair; do
    case $pair in "$platform="*) key=${pair#*=} ;; esac
done
env=$cache/envs/$key
check_limits
if [ -z "$problems" ] && is_complete && is_own && directory=$(mktemp -d "$cache/pools/$pool-XXXXXX" 2>/dev/null); then
    touch -c "$env/.complete"
    say "ready $env	$directory"
    exit 0
fi

preflight
[ -z "$problems" ] || exit 0
mkdir -p "$cache/envs" "$cache/bin" "$cache/wheels" "$cache/pools" "$cache/logs" "$cache/stage"
chmod 700 "$cache/envs" "$cache/bin" "$cache/wheels" "$cache/pools" "$cache/logs" "$cache/stage"
# Left by a setup that was killed.
find "$cache/stage" -mindepth 1 -maxdepth 1 -mtime +0 -exec rm -rf {} + 2>/dev/null
for kept in "$cache"/wheels/*; do say "wheel ${kept##*/}"; done
for kept in "$cache"/envs/*/.complete; do
    env=${kept%/*}
    ! is_complete || say "complete ${env##*/}"
done
! find_uv || say "uv $uv"
stage=$(mktemp -d "$cache/stage/XXXXXX") && say "stage $stage"
