# Runs once in a cluster, before its daemons: keys, owners and folders.
set -eu
install -d -o munge -g munge -m 755 /run/munge
install -d -o mysql -g mysql -m 755 /run/mysqld /run/mariadbd # the newest MariaDB moved its socket
install -d -m 755 /run/sshd
install -d -o slurm -g slurm -m 755 /run/slurm /var/lib/bed/slurmctld
chown slurm: /var/log/bed
head -c 1024 /dev/urandom > /etc/munge/munge.key
chown munge: /etc/munge/munge.key
chmod 400 /etc/munge/munge.key
head -c 32 /dev/urandom > /etc/slurm/jwt_hs256.key
chown slurm: /etc/slurm/jwt_hs256.key /etc/slurm/slurmdbd.conf
chmod 600 /etc/slurm/jwt_hs256.key /etc/slurm/slurmdbd.conf
ssh-keygen -q -t ed25519 -N '' -C login -f /etc/ssh/host_key
ssh-keygen -q -t ed25519 -N '' -C tester -f /opt/bed/user_key
for user in alice bob mlops; do
  install -o $user -g $user -m 600 /opt/bed/user_key.pub /home/$user/.ssh/authorized_keys
done
install -d -o alice -g alice -m 755 /shared/gangs
