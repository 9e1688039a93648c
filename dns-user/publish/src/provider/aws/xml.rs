//! XML elements as used by Route 53. Pure.

use quick_xml::{
    Reader,
    escape::escape,
    events::{BytesRef, Event},
};

const MAX_DEPTH: usize = 32;

/// An element without attributes: either text or children.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Element {
    pub(super) name: String,
    pub(super) text: String,
    pub(super) children: Vec<Element>,
}

impl Element {
    /// Returns an element with text.
    pub(super) fn text(name: &str, text: &str) -> Self {
        Self { name: name.to_owned(), text: text.to_owned(), children: Vec::new() }
    }

    /// Returns an element with children.
    pub(super) fn of(name: &str, children: impl IntoIterator<Item = Self>) -> Self {
        Self { name: name.to_owned(), text: String::new(), children: children.into_iter().collect() }
    }

    pub(super) fn parse(document: &[u8]) -> Result<Self, String> {
        let mut reader = Reader::from_reader(document);
        let mut open: Vec<Self> = vec![Self::default()];
        loop {
            match reader.read_event().map_err(|error| error.to_string())? {
                Event::Start(start) => {
                    if open.len() > MAX_DEPTH {
                        return Err("elements are nested too deeply".to_owned());
                    }
                    let name = String::from_utf8_lossy(start.local_name().as_ref()).into_owned();
                    open.push(Self { name, ..Self::default() });
                }
                Event::Empty(start) => {
                    let name = String::from_utf8_lossy(start.local_name().as_ref()).into_owned();
                    innermost(&mut open)?.children.push(Self { name, ..Self::default() });
                }
                Event::End(_) => {
                    let mut closed = open.pop().ok_or("an element is closed twice")?;
                    if !closed.children.is_empty() {
                        // Text between children is indentation.
                        closed.text.clear();
                    }
                    innermost(&mut open)?.children.push(closed);
                }
                Event::Text(text) => {
                    let text = text.decode().map_err(|error| error.to_string())?;
                    innermost(&mut open)?.text.push_str(&text);
                }
                Event::CData(data) => {
                    innermost(&mut open)?.text.push_str(&String::from_utf8_lossy(&data));
                }
                Event::GeneralRef(reference) => innermost(&mut open)?.text.push(character(&reference)?),
                Event::Eof => break,
                Event::Comment(_) | Event::Decl(_) | Event::PI(_) | Event::DocType(_) => {}
            }
        }
        let [root] = &mut open[..] else { return Err("it is truncated".to_owned()) };
        root.children.pop().ok_or_else(|| "it has no element".to_owned())
    }

    /// Returns the first child with this name.
    pub(super) fn child(&self, name: &str) -> Option<&Self> {
        self.children.iter().find(|child| child.name == name)
    }

    /// Returns the text of the first child with this name; empty without one.
    pub(super) fn text_of(&self, name: &str) -> &str {
        self.child(name).map_or("", |child| child.text.trim())
    }

    /// Returns the children of the first child with this name.
    pub(super) fn list(&self, name: &str) -> impl Iterator<Item = &Self> {
        self.child(name).into_iter().flat_map(|list| &list.children)
    }

    /// Returns the first element with this name at any depth.
    pub(super) fn find(&self, name: &str) -> Option<&Self> {
        if self.name == name {
            return Some(self);
        }
        self.children.iter().find_map(|child| child.find(name))
    }

    /// Appends the element as XML.
    pub(super) fn write(&self, xml: &mut String) {
        let Self { name, text, children } = self;
        xml.push_str(&format!("<{name}>{}", escape(text.as_str())));
        for child in children {
            child.write(xml);
        }
        xml.push_str(&format!("</{name}>"));
    }

    /// Returns an XML document with a namespace.
    pub(super) fn document(&self, namespace: &str) -> String {
        let mut xml = String::new();
        self.write(&mut xml);
        let head = format!("<{}", self.name);
        // The root's start tag comes first.
        let rest = xml.strip_prefix(&head).unwrap_or(&xml);
        format!("<?xml version=\"1.0\" encoding=\"UTF-8\"?>{head} xmlns=\"{namespace}\"{rest}")
    }
}

fn innermost(open: &mut [Element]) -> Result<&mut Element, String> {
    open.last_mut().ok_or_else(|| "an element is closed twice".to_owned())
}

/// Returns the character for `&name;` or `&#number;`.
fn character(reference: &BytesRef<'_>) -> Result<char, String> {
    if let Some(character) = reference.resolve_char_ref().map_err(|error| error.to_string())? {
        return Ok(character);
    }
    match &**reference {
        b"lt" => Ok('<'),
        b"gt" => Ok('>'),
        b"amp" => Ok('&'),
        b"quot" => Ok('"'),
        b"apos" => Ok('\''),
        other => Err(format!("unknown entity {}", String::from_utf8_lossy(other))),
    }
}
