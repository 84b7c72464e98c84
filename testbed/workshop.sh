#!/bin/sh
# Runs inside the bare node root, whose changes are thrown away, with network: fetches the packages that nodes may
# install, and builds what is made for nodes. So the packages fit the nodes and the programs fit their libraries,
# whatever the machine outside is.
#
# workshop.sh SOURCES OUTPUT PACKAGE...
set -eu
sources=$1
output=$2
shift 2
export DEBIAN_FRONTEND=noninteractive
tools=/opt/mpitrain-testbed

apt-get --quiet update
# What the packages need beyond the bare root. One at a time: some of them conflict with each other.
mkdir -p "$output/repository/deb/partial"
for package; do
    apt-get --quiet --yes --no-install-recommends --download-only \
        -o Dir::Cache::archives="$output/repository/deb" install "$package"
done
rm -rf "$output/repository/deb/partial" "$output/repository/deb/lock"

apt-get --quiet --yes --no-install-recommends -o Dpkg::Options::=--force-unsafe-io install \
    apt-utils gcc libc6-dev pkg-config libnfs-dev libfuse3-dev libfaketime
(
    cd "$output/repository"
    apt-ftparchive packages deb >Packages
    gzip --keep Packages
    apt-ftparchive release . >Release
)
cc -O2 -Wall -Wextra -pthread -static -o "$output/wire" "$sources/wire.c"

# The NFS stand-in: a server out of nfs-ganesha's packages and a client, with the libraries that bare nodes lack, away
# from where dpkg puts things: it knows nothing of them.
mkdir -p "$output/nfs$tools/lib"
# shellcheck disable=SC2046  # pkg-config prints several words
cc -O2 -Wall -Wextra -Wno-unused-parameter "-Wl,-rpath,$tools/lib" \
    -o "$output/nfs$tools/nfs_mount" "$sources/nfs_mount.c" \
    $(pkg-config --cflags --libs fuse3 libnfs)
for library in libfuse3.so.3 libnfs.so.13 faketime/libfaketime.so.1; do
    cp --dereference "/usr/lib/x86_64-linux-gnu/$library" "$output/nfs$tools/lib/"
done
for package in nfs-ganesha nfs-ganesha-vfs libntirpc4.3 liburcu8 libwbclient0 libnfsidmap1; do
    dpkg-deb --extract "$output/repository/deb/${package}"_*.deb "$output/nfs$tools"
done
find "$output/nfs$tools/usr/lib" -name '*.so*' -not -path '*/ganesha/libfsal*' -exec cp -a {} "$output/nfs$tools/lib/" \;
rm -rf "$output/nfs$tools/usr/share" "$output/nfs$tools/etc" "$output/nfs$tools/lib/systemd"

# nfs-common and nfs-kernel-server bring programs of these names; dpkg is told to put them aside.
for file in /sbin/mount.nfs /sbin/mount.nfs4 /usr/sbin/exportfs; do
    dpkg-divert --quiet --local --no-rename --add --divert "$file.kernel" "$file"
done
mkdir -p "$output/nfs/var/lib/dpkg"
cp -a /var/lib/dpkg/diversions "$output/nfs/var/lib/dpkg/"
