//! Counts datagrams dropped by full receive queues of UDP sockets.

use std::fs;

/// Returns the number of these datagrams so far in the calling thread's network namespace, for both
/// families (`RcvbufErrors`; 0 on a kernel without the file).
pub(super) fn lost() -> u64 {
    let v4 = fs::read_to_string("/proc/thread-self/net/snmp").unwrap_or_default();
    let v6 = fs::read_to_string("/proc/thread-self/net/snmp6").unwrap_or_default();
    lost_v4(&v4).unwrap_or(0) + lost_v6(&v6).unwrap_or(0)
}

/// Parses the counter in `snmp`: a line of names, then a line of numbers.
fn lost_v4(text: &str) -> Option<u64> {
    let mut lines = text.lines().filter(|line| line.starts_with("Udp:"));
    let (names, numbers) = (lines.next()?, lines.next()?);
    let place = names.split_whitespace().position(|name| name == "RcvbufErrors")?;
    numbers.split_whitespace().nth(place)?.parse().ok()
}

/// Parses the counter in `snmp6`: a name and a number per line.
fn lost_v6(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with("Udp6RcvbufErrors"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_files_are_read() {
        let v4 = "Tcp: RtoMin\nTcp: 200\nUdp: InDatagrams InErrors RcvbufErrors\nUdp: 7 2 13\nUdpLite: RcvbufErrors\nUdpLite: 9\n";
        assert_eq!(lost_v4(v4), Some(13));
        assert_eq!(lost_v6("Udp6InErrors \t0\nUdp6RcvbufErrors                \t4\n"), Some(4));
        let ours = fs::read_to_string("/proc/thread-self/net/snmp").unwrap();
        assert!(lost_v4(&ours).is_some(), "{ours}");
        assert_eq!(lost_v4(""), None);
    }
}
