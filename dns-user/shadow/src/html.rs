//! The report as one page that needs nothing else: styles and figures are part of it.

use std::fmt::Write;

use crate::report::{Difference, PAGE, Report, ShownExample};

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}\
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}table{border-collapse:collapse}\
td,th{padding:.15rem .8rem .15rem 0;text-align:left;vertical-align:top}pre{background:#f4f4f4;padding:.6rem;\
overflow-x:auto;white-space:pre-wrap;overflow-wrap:anywhere}.bad{color:#a40000}.good{color:#1a6b1a}\
figure{margin:1rem 0}svg{max-width:100%;height:auto}code{overflow-wrap:anywhere}";

/// Colours of verdicts, readable with the usual forms of colour blindness.
const COLOURS: [(&str, &str); 6] = [
    ("equal", "#1b7837"),
    ("same route", "#7fbf7b"),
    ("in transition", "#c2a5cf"),
    ("documented", "#f4b942"),
    ("unexplained", "#b2182b"),
    ("not judged", "#999999"),
];

/// Returns the page.
pub fn page(report: &Report) -> String {
    let mut page = String::new();
    // Writing to a string cannot fail.
    let _ = write_page(&mut page, report);
    page
}

fn write_page(page: &mut String, report: &Report) -> std::fmt::Result {
    let verdicts = &report.verdicts;
    let (class, result) = if report.has_unexplained() {
        ("bad", "There are unexplained differences")
    } else if verdicts.compared == 0 {
        ("bad", "Nothing was compared")
    } else {
        ("good", "No unexplained difference")
    };
    write!(
        page,
        "<!DOCTYPE html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width\"><title>Shadow: {result}</title><style>{STYLE}</style></head><body>\
         <h1 class=\"{class}\">{result}</h1>"
    )?;
    let addresses: Vec<String> = report.addresses.iter().map(ToString::to_string).collect();
    write!(
        page,
        "<p>{} ({}) observed {} for {:.0} seconds: {} of about {} queries ({:.1} %), {} compared with {} instances in the \
         records. Health: {}.</p>",
        escaped(&report.program),
        escaped(&report.mode),
        escaped(&addresses.join(", ")),
        report.seconds,
        report.seen.queries,
        report.seen.estimated_queries,
        report.seen.sampled_share * 100.0,
        verdicts.compared,
        report.instances,
        escaped(&report.health)
    )?;
    let counts = [
        verdicts.equal,
        verdicts.same_route,
        verdicts.in_transition,
        verdicts.documented,
        verdicts.unexplained,
        verdicts.unjudged,
    ];
    let parts: Vec<(&str, &str, u64)> = COLOURS
        .iter()
        .zip(counts)
        .map(|((name, colour), count)| (*name, *colour, count))
        .collect();
    write_stack(page, "Verdicts", &parts)?;
    let mut parts = vec![("from an interface", COLOURS[0].1, report.interface.answered)];
    // Shades of one colour: the reasons have no order.
    let shades = [
        "#4393c3", "#92c5de", "#2166ac", "#d1e5f0", "#67a9cf", "#3288bd",
    ];
    for ((reason, count), shade) in report.interface.others.iter().zip(shades.iter().cycle()) {
        parts.push((reason, shade, *count));
    }
    write_stack(page, "Who would have answered", &parts)?;
    write_latencies(page, report)?;
    write_costs(page, report)?;
    for difference in &report.differences {
        write_difference(page, difference)?;
    }
    for remark in &report.remarks {
        write!(page, "<p>{}</p>", escaped(remark))?;
    }
    write!(page, "</body></html>")
}

/// Draws counts as parts of one bar, with a legend that names each.
fn write_stack(page: &mut String, title: &str, parts: &[(&str, &str, u64)]) -> std::fmt::Result {
    const BAR: f64 = 900.0;
    let total: u64 = parts.iter().map(|(.., count)| count).sum();
    write!(
        page,
        "<h2>{title}</h2><figure><svg viewBox=\"0 0 900 28\" width=\"900\" height=\"28\" role=\"img\" aria-label=\"{title}\">"
    )?;
    let mut left = 0.0;
    for (name, colour, count) in parts {
        if total == 0 || *count == 0 {
            continue;
        }
        let width = BAR * *count as f64 / total as f64;
        write!(
            page,
            "<rect x=\"{left:.1}\" y=\"0\" width=\"{width:.1}\" height=\"28\" fill=\"{colour}\"><title>{}: {count}</title></rect>",
            escaped(name)
        )?;
        left += width;
    }
    write!(page, "</svg></figure><table>")?;
    for (name, colour, count) in parts {
        let share = if total == 0 {
            0.0
        } else {
            *count as f64 / total as f64 * 100.0
        };
        write!(
            page,
            "<tr><td><svg viewBox=\"0 0 12 12\" width=\"12\" height=\"12\"><rect width=\"12\" height=\"12\" \
             fill=\"{colour}\"/></svg> {}</td><td>{count}</td><td>{share:.2} %</td></tr>",
            escaped(name)
        )?;
    }
    write!(page, "</table>")
}

fn write_latencies(page: &mut String, report: &Report) -> std::fmt::Result {
    let buckets = &report.latency.buckets;
    let Some(most) = buckets.iter().map(|(_, count)| *count).max() else {
        return Ok(());
    };
    let height = 20 * buckets.len();
    write!(
        page,
        "<h2>Latency of the observed server</h2><figure><svg viewBox=\"0 0 900 {height}\" width=\"900\" \
         height=\"{height}\" role=\"img\" aria-label=\"Latency of the observed server\" font-size=\"12\">"
    )?;
    for (at, (bound, count)) in buckets.iter().enumerate() {
        let name = match bound {
            Some(bound) => format!("up to {bound} µs"),
            None => "more".to_owned(),
        };
        let width = 600.0 * *count as f64 / most as f64;
        let (top, base) = (at * 20 + 3, at * 20 + 14);
        write!(
            page,
            "<text x=\"120\" y=\"{base}\" text-anchor=\"end\">{name}</text><rect x=\"130\" y=\"{top}\" \
             width=\"{width:.1}\" height=\"14\" fill=\"#4393c3\"/><text x=\"{:.1}\" y=\"{base}\">{count}</text>",
            width + 136.0
        )?;
    }
    write!(page, "</svg></figure>")
}

fn write_costs(page: &mut String, report: &Report) -> std::fmt::Result {
    let cpu = &report.cpu;
    write!(page, "<h2>CPU</h2><table>")?;
    let observed = match (&cpu.process, cpu.observed_seconds) {
        (Some((number, name)), Some(seconds)) => {
            format!("{seconds:.2} s (process {number}, {name})")
        }
        _ => "not known: no process with this socket is visible".to_owned(),
    };
    let estimated = match cpu.estimated_seconds {
        Some(seconds) => format!("{seconds:.2} s, an estimate: {}", cpu.method),
        None => "not estimated".to_owned(),
    };
    for (name, value) in [
        ("observed server", observed),
        ("bosh-dns-xdp", estimated),
        (
            "this comparison",
            format!("{:.1} % of a core", cpu.own_share * 100.0),
        ),
    ] {
        write!(page, "<tr><td>{name}</td><td>{}</td></tr>", escaped(&value))?;
    }
    write!(page, "</table>")
}

fn write_difference(page: &mut String, difference: &Difference) -> std::fmt::Result {
    match &difference.documented {
        Some([section, cell]) => write!(
            page,
            "<h2>Documented, {} times</h2><p>{} <em>({PAGE}, {})</em></p>",
            difference.count,
            escaped(cell),
            escaped(section)
        )?,
        None => write!(
            page,
            "<h2 class=\"bad\">Unexplained, {} times: {}</h2>",
            difference.count,
            escaped(&difference.cause)
        )?,
    }
    for example in &difference.examples {
        write_example(page, example)?;
    }
    Ok(())
}

fn write_example(page: &mut String, example: &ShownExample) -> std::fmt::Result {
    write!(
        page,
        "<details{}><summary><code>{}</code> {}",
        if example.findings.is_empty() {
            ""
        } else {
            " open"
        },
        escaped(&example.name),
        escaped(&example.about)
    )?;
    if let Some(client) = &example.client {
        write!(page, ", from {}", escaped(client))?;
    }
    write!(page, "</summary>")?;
    let parts = [
        ("findings", &example.findings),
        ("theirs", &example.theirs),
        ("ours", &example.ours),
        ("how the name resolves here", &example.steps),
    ];
    for (title, lines) in parts {
        if !lines.is_empty() {
            write!(page, "<pre>{title}:\n{}</pre>", escaped(&lines.join("\n")))?;
        }
    }
    write!(page, "</details>")
}

/// Escapes text for HTML: names come from the network.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            _ => escaped.push(character),
        }
    }
    escaped
}
