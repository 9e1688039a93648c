//! The report as one page that needs nothing else: styles and figures are part of it.

use std::fmt::Write;

use crate::report::{Difference, Outcome, PAGE, Report, ShownExample};

const STYLE: &str = "\
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}\
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}\
table{border-collapse:collapse}td{padding:.15rem .8rem .15rem 0;vertical-align:top}\
.name{white-space:nowrap}.count{text-align:right;font-variant-numeric:tabular-nums}\
.stack{display:flex;height:1.75rem;margin:.5rem 0}.bar{height:.9rem;margin-top:.3rem;background:#4393c3}\
.wide{width:100%}.key{display:inline-block;width:.75rem;height:.75rem;margin-right:.4rem}\
pre{background:#f4f4f4;padding:.6rem;margin:.4rem 0;white-space:pre-wrap;overflow-wrap:anywhere}\
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(20rem,100%),1fr));gap:0 .8rem}\
code{overflow-wrap:anywhere}.bad{color:#a40000}.good{color:#1a6b1a}";

/// Colours of verdicts, in the order of their rows; readable with the usual forms of colour blindness.
const VERDICTS: [&str; 6] = [
    "#1b7837", "#7fbf7b", "#c2a5cf", "#f4b942", "#b2182b", "#999999",
];
/// Colours of the interface and of reasons for the rest.
const ANSWERERS: [&str; 7] = [
    "#1b7837", "#4393c3", "#92c5de", "#2166ac", "#d1e5f0", "#67a9cf", "#3288bd",
];

/// Returns the text of the page.
pub fn page(report: &Report) -> String {
    let mut page = String::new();
    // Writing to a string cannot fail.
    let _ = write_page(&mut page, report);
    page
}

fn write_page(page: &mut String, report: &Report) -> std::fmt::Result {
    let verdicts = &report.verdicts;
    let outcome = report.outcome();
    let class = if outcome == Outcome::Equal {
        "good"
    } else {
        "bad"
    };
    let (first, rest) = outcome.text().split_at(1);
    let result = first.to_uppercase() + rest;
    write!(
        page,
        "<!DOCTYPE html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width\"><title>Shadow: {result}</title><style>{STYLE}</style></head><body>\
         <h1 class=\"{class}\">{result}</h1>"
    )?;
    let addresses: Vec<String> = report.addresses.iter().map(ToString::to_string).collect();
    write!(
        page,
        "<p>{} ({}) observed {} for {:.0} seconds: {} queries, {} compared with {} instances in the records. \
         Health: {}.</p>",
        escaped(&report.program),
        escaped(&report.mode),
        escaped(&addresses.join(", ")),
        report.seconds,
        report.seen.text(),
        verdicts.compared,
        report.instances,
        escaped(&report.health)
    )?;
    if let Some(left_out) = report.seen.left_out() {
        write!(page, "<p>Not comparable: {left_out}.</p>")?;
    }
    write_stack(page, "Verdicts", &verdicts.rows(), &VERDICTS)?;
    let mut answerers = vec![("from an interface", report.interface.answered)];
    for (reason, count) in &report.interface.others {
        answerers.push((reason, *count));
    }
    write_stack(page, "Who would have answered", &answerers, &ANSWERERS)?;
    write_latencies(page, report)?;
    write_costs(page, report)?;
    for difference in &report.differences {
        write_difference(page, difference)?;
    }
    for remark in report.remarks.iter().chain(&report.failure) {
        write!(page, "<p>{}</p>", escaped(remark))?;
    }
    write!(page, "</body></html>")
}

/// Draws counts as parts of one bar, with a legend that names each.
fn write_stack(
    page: &mut String,
    title: &str,
    parts: &[(&str, u64)],
    colours: &[&str],
) -> std::fmt::Result {
    let total: u64 = parts.iter().map(|(_, count)| count).sum();
    let mut legend = String::new();
    write!(
        page,
        "<h2>{title}</h2><div class=\"stack\" role=\"img\" aria-label=\"{title}\">"
    )?;
    // There may be more reasons than colours; the legend still tells them apart.
    for ((name, count), colour) in parts.iter().zip(colours.iter().cycle()) {
        let share = percent(*count, total);
        let name = escaped(name);
        write!(
            page,
            "<div style=\"width:{share:.2}%;background:{colour}\" title=\"{name}: {count}\"></div>"
        )?;
        write!(
            legend,
            "<tr><td><span class=\"key\" style=\"background:{colour}\"></span>{name}</td>\
             <td class=\"count\">{count}</td><td class=\"count\">{share:.2} %</td></tr>"
        )?;
    }
    write!(page, "</div><table>{legend}</table>")
}

fn write_latencies(page: &mut String, report: &Report) -> std::fmt::Result {
    let buckets = &report.latency.buckets;
    let Some(most) = buckets.iter().map(|(_, count)| *count).max() else {
        return Ok(());
    };
    write!(page, "<h2>Latency of the observed server</h2><table>")?;
    for (bound, count) in buckets {
        let name = match bound {
            Some(bound) => format!("up to {bound} µs"),
            None => "more".to_owned(),
        };
        write!(
            page,
            "<tr><td class=\"name count\">{name}</td><td class=\"count\">{count}</td>\
             <td class=\"wide\"><div class=\"bar\" style=\"width:{:.1}%\"></div></td></tr>",
            percent(*count, most)
        )?;
    }
    write!(page, "</table>")
}

fn write_costs(page: &mut String, report: &Report) -> std::fmt::Result {
    let cpu = &report.cpu;
    write!(page, "<h2>CPU</h2><table>")?;
    for (name, value) in [
        ("observed server", cpu.observed()),
        ("bosh-dns-xdp", cpu.estimated()),
        ("this comparison", cpu.own()),
    ] {
        let value = escaped(&value);
        write!(
            page,
            "<tr><td class=\"name\">{name}</td><td>{value}</td></tr>"
        )?;
    }
    write!(page, "</table>")
}

fn write_difference(page: &mut String, difference: &Difference) -> std::fmt::Result {
    match &difference.documented {
        Some([section, cell]) => write!(
            page,
            "<h2>Documented, {} times</h2><p>{} <em>({PAGE}, {})</em></p>",
            difference.count,
            with_code(cell),
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
    write_lines(page, "findings", &example.findings)?;
    write!(page, "<div class=\"pair\">")?;
    write_lines(page, "theirs", &example.theirs)?;
    write_lines(page, "ours", &example.ours)?;
    write!(page, "</div>")?;
    write_lines(page, "how the name resolves here", &example.steps)?;
    write!(page, "</details>")
}

fn write_lines(page: &mut String, title: &str, lines: &[String]) -> std::fmt::Result {
    if lines.is_empty() {
        return Ok(());
    }
    write!(page, "<pre>{title}:\n{}</pre>", escaped(&lines.join("\n")))
}

fn percent(count: u64, of: u64) -> f64 {
    if of == 0 {
        return 0.0;
    }
    count as f64 / of as f64 * 100.0
}

/// Returns a text of the documentation as HTML, in which words between backticks are code.
fn with_code(text: &str) -> String {
    let mut html = String::new();
    // Every second part is between backticks, which the page's cells have in pairs.
    for (number, part) in text.split('`').enumerate() {
        if number % 2 == 0 {
            html += &escaped(part);
        } else {
            html += &format!("<code>{}</code>", escaped(part));
        }
    }
    html
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_the_network_is_no_markup() {
        let mut page = String::new();
        let example = ShownExample {
            name: "<script>alert(1)</script>.bosh.".to_owned(),
            about: "A\" onclick='x'".to_owned(),
            client: Some("&amp".to_owned()),
            findings: vec!["<b>".to_owned()],
            theirs: vec!["</pre>".to_owned()],
            ours: Vec::new(),
            route: "fleet".to_owned(),
            steps: vec!["<i>".to_owned()],
        };
        write_example(&mut page, &example).unwrap();
        for markup in [
            "<script",
            "\" onclick",
            "'x'",
            "from &amp<",
            "<b>",
            "</pre></pre>",
            "<i>",
        ] {
            assert!(!page.contains(markup), "{markup}: {page}");
        }
        assert!(page.contains("&lt;script&gt;") && page.contains("from &amp;amp<"));
        assert_eq!(with_code("a `<b>` c"), "a <code>&lt;b&gt;</code> c");
    }
}
