# Runs once, inside the new root: what every cluster has in common.
set -eu
useradd --system --shell /usr/sbin/nologin slurmrestd # it refuses to run as root and as SlurmUser
uid=2001
for user in alice bob mlops; do
  useradd --create-home --shell /bin/bash --uid $uid $user
  usermod --password '*' $user # an account without a password is a locked one for sshd
  install -d -o $user -g $user -m 700 /home/$user/.ssh
  uid=$((uid + 1))
done
mkdir -p /shared /etc/slurm /opt/bed
rm -f /etc/ssh/ssh_host_* /etc/munge/munge.key # each cluster has its own
# One node must not ask a name server about another.
sed -i 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf
: > /etc/resolv.conf
