#!/usr/bin/env bash
# The programs that tests and rehearsals start: installs them where this is root on Debian, else names them.
set -euo pipefail
declare -A package=([ip]=iproute2 [tc]=iproute2 [unshare]=util-linux [nsenter]=util-linux [mount]=mount [tmux]=tmux [chromium]=chromium)
missing=()
for program in "${!package[@]}"; do
  command -v "$program" >/dev/null || missing+=("${package[$program]}")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing ${missing[*]} …"
  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y "${missing[@]}" >/dev/null
else
  echo "error: these system packages are absent: ${missing[*]}; install them (on Debian: apt-get install ${missing[*]})" >&2
  exit 1
fi
