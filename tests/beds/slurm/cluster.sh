# The first process of a cluster, in namespaces that are new: makes the file system, then waits for its input to end.
#   cluster.sh IMAGE HOME
# Ends, and everything in the cluster with it, when whoever holds the other end of the input goes away.
set -eu
image=$1 home=$2
space=$home/space root=$home/space/root

mount -t tmpfs -o mode=755 cluster "$space"
mkdir "$space/upper" "$space/work" "$root"
mount -t overlay cluster -o "lowerdir=$image,upperdir=$space/upper,workdir=$space/work" "$root"

mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 run "$root/run"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
mount -t tmpfs -o mode=755 dev "$root/dev"
for node in "null 3" "zero 5" "full 7" "random 8" "urandom 9"; do
  mknod -m 666 "$root/dev/${node% *}" c 1 "${node#* }"
done
mknod -m 666 "$root/dev/tty" c 5 0
mkdir "$root/dev/shm" "$root/dev/pts" "$root/dev/fakegpu"
for i in 0 1 2 3 4 5 6 7; do mknod -m 666 "$root/dev/fakegpu/nvidia$i" c 1 3; done
ln -s /proc/self/fd "$root/dev/fd"
for i in "0 stdin" "1 stdout" "2 stderr"; do ln -s "/proc/self/fd/${i% *}" "$root/dev/${i#* }"; done
ln -s pts/ptmx "$root/dev/ptmx"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
mount -t devpts -o newinstance,mode=620,ptmxmode=666 devpts "$root/dev/pts"

mkdir -p "$root/shared" "$root/var/log/bed" "$root/old"
mount --bind "$home/shared" "$root/shared"
mount --bind "$home/log" "$root/var/log/bed"

cd "$root"
pivot_root . old
cd /
umount -l /old
rmdir /old
hostname login
ip link set lo up
ip link add cluster type bridge
ip link set cluster up
echo ready
# Bash, because it collects processes that lost their parent.
exec /bin/bash -c 'while read -r _; do :; done' init
