# Makes the root file system of an Ubuntu machine in ROOT. Run as root, in a mount namespace of its own.
# Run as: sh build.sh CODENAME ROOT MIRROR KEYRING SCRIPT PACKAGES
set -eu
code=$1 root=$2 mirror=$3 keyring=$4 script=$5 packages=$6
debootstrap --keyring="$keyring" --components=main,universe "$code" "$root" "$mirror" "$script"
cat >"$root/etc/apt/sources.list" <<END
deb $mirror $code main universe
deb $mirror $code-updates main universe
END
cp --remove-destination /etc/resolv.conf "$root/etc/resolv.conf"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount --bind /dev "$root/dev"
mount -t devpts devpts "$root/dev/pts"
# Nothing that is installed is started here.
printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
chmod 755 "$root/usr/sbin/policy-rc.d"
inside() { chroot "$root" env DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"; }
inside apt-get -q update
# shellcheck disable=SC2086 # it is split into words on purpose
inside apt-get -qy --no-install-recommends install $packages
inside apt-get clean

# An archive on the machine itself: `patient`, whose new version takes until it is let go, and `handy`, to be installed.
archive=$root/opt/archive
mkdir -p "$archive"
package() {
    work=$(mktemp -d)
    mkdir "$work/DEBIAN"
    printf 'Package: %s\nVersion: %s\nArchitecture: all\nMaintainer: tests\nDescription: for tests\n' "$1" "$2" >"$work/DEBIAN/control"
    printf '#!/bin/sh\n%s\n' "$3" >"$work/DEBIAN/postinst"
    chmod 755 "$work" "$work/DEBIAN" "$work/DEBIAN/postinst"
    dpkg-deb --root-owner-group --build "$work" "$archive/$1_$2.deb" >/dev/null
    rm -rf "$work"
}
package patient 1 :
package patient 2 'n=0; while [ ! -e /run/let-go ] && [ $n -lt 1800 ]; do sleep 1; n=$((n + 1)); done'
package handy 1 :
inside dpkg -i /opt/archive/patient_1.deb
(
    cd "$archive"
    for file in *.deb; do
        dpkg-deb -f "$file"
        printf 'Filename: ./%s\nSize: %s\nSHA256: %s\n\n' "$file" "$(stat -c %s "$file")" "$(sha256sum "$file" | cut -d' ' -f1)"
    done >Packages
    printf 'Origin: Tests\nLabel: Tests\nSuite: stable\nCodename: stable\nArchitectures: amd64 all\nSHA256:\n %s %s Packages\n' \
        "$(sha256sum Packages | cut -d' ' -f1)" "$(stat -c %s Packages)" >Release
)

# As in the images of the cloud: no name, no machine id, no host keys, nothing of the machine that has made it.
rm -f "$root/usr/sbin/policy-rc.d" "$root"/etc/ssh/ssh_host_* "$root/etc/resolv.conf" "$root/etc/hostname"
ln -s ../run/systemd/resolve/stub-resolv.conf "$root/etc/resolv.conf"
: >"$root/etc/machine-id"
