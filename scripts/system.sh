#!/usr/bin/env bash
# Installs the programs that tests and rehearsals need if run as root on Debian, else lists the missing ones.
set -euo pipefail
declare -A package=([ip]=iproute2 [tc]=iproute2 [unshare]=util-linux [nsenter]=util-linux [mount]=mount [tmux]=tmux [chromium]=chromium)
root=
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  root=yes
  # Tests of Slurm need root, and are skipped without it.
  package+=([slurmctld]=slurmctld [slurmd]=slurmd [sbatch]=slurm-client [munged]=munge)
fi
missing=()
for program in "${!package[@]}"; do
  command -v "$program" >/dev/null || missing+=("${package[$program]}")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ -n "$root" ]; then
  echo "installing ${missing[*]} …"
  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y "${missing[@]}" >/dev/null
else
  echo "error: missing system packages: ${missing[*]}; install them (on Debian: apt-get install ${missing[*]})" >&2
  exit 1
fi
