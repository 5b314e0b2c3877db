#!/usr/bin/env bash
# Installs the programs that tests and rehearsals need if run as root on Debian, else lists the missing ones.
set -euo pipefail
declare -A package=([ip]=iproute2 [tc]=iproute2 [unshare]=util-linux [nsenter]=util-linux [mount]=mount [tmux]=tmux [chromium]=chromium)
# Tests of Slurm need root, and are skipped where it is not installed.
declare -A slurm=([slurmctld]=slurmctld [slurmd]=slurmd [sbatch]=slurm-client [munged]=munge)
missing=() without=()
for program in "${!package[@]}"; do
  command -v "$program" >/dev/null || missing+=("${package[$program]}")
done
for program in "${!slurm[@]}"; do
  command -v "$program" >/dev/null || without+=("${slurm[$program]}")
done
install() {
  echo "installing $* …"
  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y "$@" >/dev/null
}
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  [ ${#missing[@]} -eq 0 ] || install "${missing[@]}"
  [ ${#without[@]} -eq 0 ] || install "${without[@]}" || echo "without ${without[*]}: tests of Slurm are skipped" >&2
elif [ ${#missing[@]} -gt 0 ]; then
  echo "error: missing system packages: ${missing[*]}; install them (on Debian: apt-get install ${missing[*]})" >&2
  exit 1
fi
