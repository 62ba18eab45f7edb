# Ends the keeper of a pool on this host, if it still runs, and removes the pool's directory.
directory=$1
case $directory in /*/pools/?*) ;; *) exit 2 ;; esac

# A process of another pool may have the same id by now.
is_keeper() { [ -n "$pid" ] && tr '\0' '\n' <"/proc/$pid/cmdline" 2>/dev/null | grep -qxF -e "$directory"; }

pid=$(cat "$directory/keeper.pid" 2>/dev/null)
case $pid in *[!0-9]*) pid= ;; esac
if is_keeper; then
    : >"$directory/ending" # a machine's engine may send SIGTERM to every process, too: this one is meant
    kill -TERM "$pid" 2>/dev/null
    left=50
    while is_keeper && [ "$left" -gt 0 ]; do
        sleep 0.1 2>/dev/null || { sleep 1 && left=$((left - 9)); }
        left=$((left - 1))
    done
    ! is_keeper || kill -KILL "$pid" 2>/dev/null
fi
# In memory, where a keeper that was killed has left it.
scratch=$(cat "$directory/scratch" 2>/dev/null)
case $scratch in
    /*/skyward-*) if [ -d "$scratch" ] && [ ! -L "$scratch" ] && [ -O "$scratch" ]; then rm -rf "$scratch"; fi ;;
esac
# Processes that the keeper started may write there until they are gone.
for _ in 1 2 3 4 5; do
    rm -rf "$directory" 2>/dev/null
    [ -e "$directory" ] || exit 0
    sleep 1
done
exit 1
