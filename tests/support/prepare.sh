#!/usr/bin/env bash
# Gets what the tests need: MariaDB, Redis, and (best effort) MySQL 9.
#
# As root on a Debian-like system it installs what is missing; otherwise it says what to install, and fails only where
# CI=true. No system service is started. MySQL 9 comes from Debian's unstable suite as a tree of its own, because no
# stable Debian release has it; without it the tests of MySQL are skipped.
#
#   ZZOL_TEST_MYSQL_ROOT      where that tree is (default /var/cache/zzol-relay-tests/sid)
#   ZZOL_TEST_DEBIAN_MIRROR   where to get it from (default: debootstrap's own)

set -euo pipefail

mysql_root=${ZZOL_TEST_MYSQL_ROOT:-/var/cache/zzol-relay-tests/sid}
mirror=${ZZOL_TEST_DEBIAN_MIRROR:-}
limit=300
PATH=$PATH:/usr/sbin:/sbin

say() { printf 'tests: %s\n' "$*"; }
has() { command -v "$1" >/dev/null 2>&1; }
is_root() { [ "$(id -u)" -eq 0 ]; }

has_mariadb() {
    # my_print_defaults is called by mariadb-install-db, but comes with the client.
    has mariadb-install-db && has my_print_defaults && { has mariadbd || mysqld --version 2>/dev/null | grep -q MariaDB; }
}

has_redis() {
    local program major
    for program in redis-server valkey-server; do
        major=$("$program" --version 2>/dev/null | sed -nE 's/.*v=([0-9]+)\..*/\1/p') || continue
        [ "${major:-0}" -ge 7 ] && return 0
    done
    return 1
}

has_mysql() {
    has mysqld && mysqld --no-defaults --version 2>/dev/null | grep -v MariaDB | grep -qE 'Ver ([89]|[1-9][0-9])\.'
}

policy=/usr/sbin/policy-rc.d
kept=
forbidden=

# Debian starts a service as soon as it is installed, unless this file says no.
forbid_services() {
    [ -z "$forbidden" ] || return 0
    if [ -e "$policy" ]; then
        kept=$(mktemp "$policy.XXXXXX")
        mv -f "$policy" "$kept"
    fi
    forbidden=yes
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
}

restore() {
    [ -n "$forbidden" ] || return 0
    rm -f "$policy"
    [ -z "$kept" ] || mv -f "$kept" "$policy"
    forbidden=
}
trap restore EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

updated=
install() {
    has apt-get && is_root || return 1
    [ -n "$updated" ] || apt-get -qq update >/dev/null || say "apt-get update failed; trying with the lists as they are"
    updated=yes
    forbid_services
    say "installing $*"
    DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install "$@" >/dev/null </dev/null
}

install_mariadb() {
    # The server without its service; where a release has no such package, the whole one.
    install mariadb-server-core mariadb-client-core || install mariadb-server
}

install_redis() {
    install redis-server || return 1
    # It would start at the next boot.
    if has systemctl; then systemctl disable redis-server >/dev/null 2>&1 || true; fi
}

services() {
    local missing=()
    has_mariadb || install_mariadb || true
    has_mariadb || missing+=("MariaDB 10.6 or later (Debian: mariadb-server-core, mariadb-client-core)")
    has_redis || install_redis || true
    has_redis || missing+=("Redis 7 or Valkey (Debian: redis-server)")
    [ "${#missing[@]}" -gt 0 ] || return 0
    local what
    for what in "${missing[@]}"; do say "missing: $what; install it, or its tests are skipped"; done
    [ "${CI:-}" != true ]
}

remove_partial() {
    local mounted
    # A bootstrap that was killed leaves /proc mounted inside.
    while read -r _ mounted _; do
        case $mounted in "$1"/*) umount -l "$mounted" || return 1 ;; esac
    done </proc/mounts
    rm -rf --one-file-system -- "$1"
}

mysql9() {
    local partial=$mysql_root.partial log=$mysql_root.log
    if has_mysql || [ -e "$mysql_root/.zzol-complete" ]; then return 0; fi
    if ! is_root; then
        say "MySQL 9 is left out: its tree needs root"
        return 0
    fi
    if [ -e "$mysql_root" ]; then
        say "MySQL 9 is left out: $mysql_root exists and is not a tree made here"
        return 0
    fi
    if ! has debootstrap && ! install debootstrap debian-archive-keyring; then
        say "MySQL 9 is left out: debootstrap is missing"
        return 0
    fi
    mkdir -p "$(dirname "$mysql_root")"
    exec 9>"$mysql_root.lock"
    if has flock && ! flock -w "$limit" 9; then
        say "MySQL 9 is left out: another run is still making its tree"
        return 0
    fi
    if [ -e "$mysql_root/.zzol-complete" ]; then return 0; fi
    remove_partial "$partial" || return 0
    say "making a Debian tree with MySQL 9 in $mysql_root (once; at most $limit s)"
    if timeout -k 20 "$limit" debootstrap --variant=minbase --include=mysql-server-core,redis-server,valkey-server \
        sid "$partial" ${mirror:+"$mirror"} >"$log" 2>&1 </dev/null 9>&- &&
        chroot "$partial" /usr/sbin/mysqld --no-defaults --version >>"$log" 2>&1; then
        rm -rf "$partial"/var/cache/apt/archives/*.deb "$partial"/var/lib/apt/lists/*
        touch "$partial/.zzol-complete"
        mv "$partial" "$mysql_root"
    else
        say "MySQL 9 is left out: the tree could not be made; $log ends:"
        tail -n 5 "$log" | sed 's/^/  /'
        remove_partial "$partial" || true
    fi
}

status=0
services || status=1
mysql9 || say "MySQL 9 is left out"
exit "$status"
