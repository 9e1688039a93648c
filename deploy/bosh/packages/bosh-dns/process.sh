# shellcheck shell=bash
# Functions of the job's scripts: logs, processes with pid files, the server's address.
# Sourced by them; expects SCRIPT (its name, for the log) and TIMESTAMPS (rfc3339 or deprecated), and JOB in other
# jobs than bosh-dns.

RUN_DIR=/var/vcap/sys/run/${JOB:-bosh-dns}
LOG_DIR=/var/vcap/sys/log/${JOB:-bosh-dns}
JOB_DIR=/var/vcap/jobs/${JOB:-bosh-dns}
# shellcheck disable=SC2034 # The scripts use it.
PACKAGE_DIR=/var/vcap/packages/bosh-dns
# The dummy interface for systemd-resolved.
INTERFACE=bosh-dns
# Time for a process to end after SIGTERM, in tenths of a second.
STOP_PATIENCE=100

# Prints the time in the format of the job's logs.
timestamp() {
  if [ "${TIMESTAMPS}" = deprecated ]; then
    date +'[%Y-%m-%d %H:%M:%S%z]'
  else
    date --utc +'[%Y-%m-%dT%H:%M:%S.%NZ]'
  fi
}

# Prefixes every line of standard input with the time.
dated() {
  local line
  while IFS= read -r line; do
    printf '%s %s\n' "$(timestamp)" "${line}"
  done
}

# Makes a folder ($1) that root alone may write to. Pid files of another owner are removed, because this
# script runs as root, follows links and kills by pid.
own_folder() {
  mkdir -p "$1"
  if [ -L "$1" ]; then
    echo "${SCRIPT}: $1 is a symbolic link; remove it" >&2
    exit 1
  fi
  if [ "$(stat --format=%u "$1")" != 0 ]; then
    chown root:root "$1"
    chmod 755 "$1"
    rm -f -- "$1"/*.pid
  fi
}

# Removes a file ($1) before it is written, unless it is a regular file with one name.
plain_file() {
  if [ -L "$1" ] || { [ -e "$1" ] && { [ ! -f "$1" ] || [ "$(stat --format=%h "$1")" != 1 ]; }; }; then
    rm -rf -- "$1"
  fi
}

# Makes the folders, and redirects the output of the script and its commands to the script's logs.
begin() {
  own_folder "${LOG_DIR}"
  own_folder "${RUN_DIR}"
  plain_file "${LOG_DIR}/${SCRIPT}.stdout.log"
  plain_file "${LOG_DIR}/${SCRIPT}.stderr.log"
  exec > >(dated >>"${LOG_DIR}/${SCRIPT}.stdout.log") 2> >(dated >>"${LOG_DIR}/${SCRIPT}.stderr.log")
}

# Succeeds if the process in a pid file is running.
lives() {
  local pid
  pid=$(head -n 1 "$1" 2>/dev/null) && [ -n "${pid}" ] && [ -d "/proc/${pid}" ]
}

# start_process PIDFILE LOG OPEN_FILES COMMAND...: runs a command in the job's folder, with its output
# appended to LOG.stdout.log and LOG.stderr.log. Does nothing if the process is running.
start_process() {
  local pid_file=$1 log=$2 open_files=$3
  shift 3
  if lives "${pid_file}"; then
    return
  fi
  plain_file "${pid_file}"
  plain_file "${LOG_DIR}/${log}.stdout.log"
  plain_file "${LOG_DIR}/${log}.stderr.log"
  (
    cd "${JOB_DIR}" || exit
    # Otherwise the machine's maximum.
    ulimit -n "${open_files}" 2>/dev/null || ulimit -S -n "$(ulimit -H -n)"
    exec "$@" >>"${LOG_DIR}/${log}.stdout.log" 2>>"${LOG_DIR}/${log}.stderr.log" </dev/null
  ) &
  echo "$!" >"${pid_file}"
  echo "started ${log} (pid $!)"
}

# Creates the user that the attacher switches to (xdp.attach_user), unless it exists.
add_attach_user() {
  local user=bosh-dns-xdp-attach
  if ! getent passwd "${user}" >/dev/null; then
    # Another process may have created it meanwhile.
    useradd --system --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin "${user}" ||
      getent passwd "${user}" >/dev/null
  fi
}

# stop_process PIDFILE: sends SIGTERM, then SIGKILL to a process that does not end.
stop_process() {
  local pid_file=$1 pid left=${STOP_PATIENCE}
  if lives "${pid_file}"; then
    pid=$(head -n 1 "${pid_file}")
    kill -TERM "${pid}" 2>/dev/null || true
    while [ "${left}" -gt 0 ] && [ -d "/proc/${pid}" ]; do
      sleep 0.1
      left=$((left - 1))
    done
    if [ -d "/proc/${pid}" ]; then
      echo "process ${pid} did not end by SIGTERM; killed" >&2
      kill -KILL "${pid}" 2>/dev/null || true
    fi
    echo "stopped process ${pid}"
  fi
  rm -f "${pid_file}"
}

# Succeeds if an interface ($1) has the address $2. Without a pipe to `grep -q`, which exits at the first match:
# SIGPIPE would end `ip`, and with pipefail the pipe would fail.
has_address() {
  local addresses
  addresses=$(ip -oneline address show dev "$1" 2>/dev/null) && [[ ${addresses} == *" $2/"* ]]
}

# Adds the server's address ($1) to lo, unless it is there.
add_alias() {
  if ! has_address lo "$1"; then
    # Another process may have added it meanwhile.
    ip address add "$1" dev lo || has_address lo "$1"
  fi
}

# Removes the address ($1) from lo.
remove_alias() {
  if has_address lo "$1"; then
    ip address delete "$1" dev lo
  fi
}

# Makes the dummy interface with the server's address ($1), and configures it in systemd-resolved;
# $2: the log level of systemd-resolved. bosh_dns_resolvconf_ctl configures the domains.
add_interface() {
  if ! ip link show dev "${INTERFACE}" >/dev/null 2>&1; then
    ip link add "${INTERFACE}" type dummy
  fi
  if ! has_address "${INTERFACE}" "$1"; then
    ip address add "$1/32" dev "${INTERFACE}"
  fi
  ip link set "${INTERFACE}" up
  resolvectl dns "${INTERFACE}" "$1"
  resolvectl default-route "${INTERFACE}" no
  resolvectl log-level "$2"
}

# Removes the dummy interface.
remove_interface() {
  if ip link show dev "${INTERFACE}" >/dev/null 2>&1; then
    ip link delete "${INTERFACE}"
  fi
}
