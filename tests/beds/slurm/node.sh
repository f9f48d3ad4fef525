# The first process of a node, in namespaces that are new: what is private to it, then waits for its input to end.
#   node.sh NAME
set -eu
hostname "$1"
mount -t proc proc /proc
mount -t sysfs -o ro sysfs /sys
mount -t tmpfs -o mode=1777 tmp /tmp
mount -t tmpfs -o mode=1777 shm /dev/shm
ip link set lo up
echo ready
exec /bin/bash -c 'while read -r _; do :; done' init
