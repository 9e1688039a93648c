//! Latencies by interval, in the log format of HdrHistogram, whose tools draw and merge them.

use std::time::{Duration, SystemTime};

use anyhow::Result;
use hdrhistogram::{
    Histogram,
    serialization::{
        V2DeflateSerializer,
        interval_log::{IntervalLogWriter, IntervalLogWriterBuilder, Tag},
    },
};

use crate::report::{Report, empty_histogram};

/// Nanoseconds in the unit of the log's maxima: milliseconds, as other programs write them.
const MAX_VALUE_DIVISOR: f64 = 1e6;

/// Tag of service times; latencies have none, and are what the tools read by default.
const SERVICE_TIME: &str = "service";

/// A log that is being written.
pub(crate) struct LatencyLog<'a> {
    writer: IntervalLogWriter<'a, 'a, Vec<u8>, V2DeflateSerializer>,
    /// Not written yet: replies to its last queries will be added.
    last: Option<Report>,
    /// Seconds and [`Report::histograms`] of the intervals that were written.
    seconds: f64,
    written: [Histogram<u64>; 2],
}

impl<'a> LatencyLog<'a> {
    /// Begins a log with its heading.
    pub(crate) fn begin(
        text: &'a mut Vec<u8>,
        serializer: &'a mut V2DeflateSerializer,
    ) -> Result<Self> {
        let now = SystemTime::now();
        let writer = IntervalLogWriterBuilder::new()
            .add_comment("[Histogram log format version 1.3]")
            .add_comment("Latencies in nanoseconds")
            .with_start_time(now)
            // The tools take times of intervals as counted from here.
            .with_base_time(now)
            .with_max_value_divisor(MAX_VALUE_DIVISOR)
            .begin_log_with(text, serializer)?;
        Ok(Self {
            writer,
            last: None,
            seconds: 0.0,
            written: [empty_histogram()?, empty_histogram()?],
        })
    }

    /// Adds an interval.
    pub(crate) fn add(&mut self, report: &Report) -> Result<()> {
        // An interval is kept until the next one comes: the last one gets the late replies too.
        let Some(last) = self.last.replace(report.clone()) else {
            return Ok(());
        };
        self.write(&last.histograms, last.seconds)?;
        for (written, histogram) in self.written.iter_mut().zip(last.histograms) {
            written.add(histogram)?;
        }
        self.seconds += last.seconds;
        Ok(())
    }

    /// Ends the log: its last interval has what the load has and the others have not.
    pub(crate) fn end(mut self, total: &Report) -> Result<()> {
        let mut rest = total.histograms.clone();
        for (rest, written) in rest.iter_mut().zip(&self.written) {
            rest.subtract(written)?;
        }
        self.write(&rest, (total.seconds - self.seconds).max(0.0))
    }

    fn write(&mut self, histograms: &[Histogram<u64>], seconds: f64) -> Result<()> {
        let begin = Duration::from_secs_f64(self.seconds);
        let length = Duration::from_secs_f64(seconds);
        for (histogram, tag) in histograms.iter().zip([None, Tag::new(SERVICE_TIME)]) {
            self.writer.write_histogram(histogram, begin, length, tag)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use base64::{Engine as _, engine::general_purpose::STANDARD};
    use hdrhistogram::serialization::{
        Deserializer,
        interval_log::{IntervalLogIterator, LogEntry},
    };

    use super::*;
    use crate::report::tests::report;

    /// Returns a report of these latencies, and of service times that are half as long.
    fn with_latencies(latencies: &[u64]) -> Report {
        let mut histograms = vec![empty_histogram().unwrap(); 2];
        for &latency in latencies {
            histograms[0].record(latency).unwrap();
            histograms[1].record(latency / 2).unwrap();
        }
        Report {
            histograms,
            ..report(10, 10)
        }
    }

    /// Late replies, and those of a part at the end, are in the last interval.
    #[test]
    fn log_has_every_latency_once() {
        let mut text = Vec::new();
        let mut serializer = V2DeflateSerializer::new();
        let mut log = LatencyLog::begin(&mut text, &mut serializer).unwrap();
        log.add(&with_latencies(&[1_000, 2_000])).unwrap();
        log.add(&with_latencies(&[3_000])).unwrap();
        let total = Report {
            seconds: 4.5,
            ..with_latencies(&[1_000, 2_000, 3_000, 4_000, 5_000_000])
        };
        log.end(&total).unwrap();

        let mut intervals = Vec::new();
        for entry in IntervalLogIterator::new(&text) {
            let LogEntry::Interval(interval) = entry.unwrap() else {
                continue;
            };
            let bytes = STANDARD.decode(interval.encoded_histogram()).unwrap();
            let histogram: Histogram<u64> = Deserializer::new()
                .deserialize(&mut bytes.as_slice())
                .unwrap();
            let begin = interval.start_timestamp().as_secs_f64();
            let length = interval.duration().as_secs_f64();
            let tag = interval.tag().map(|tag| tag.as_str());
            intervals.push((begin, length, histogram.len(), tag));
        }
        let service = Some("service");
        assert_eq!(
            intervals,
            [
                (0.0, 2.0, 2, None),
                (0.0, 2.0, 2, service),
                (2.0, 2.5, 3, None),
                (2.0, 2.5, 3, service)
            ]
        );
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains("#[BaseTime: "), "{text}");
        // 2.5 ms, as far as two digits say.
        let last = text.lines().last().unwrap();
        assert!(
            last.starts_with("Tag=service,") && last.contains(",2.5"),
            "{text}"
        );
    }
}
