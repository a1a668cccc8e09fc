//! `NCCL_IB_HCA`: which devices and ports to use, `[^][=]name[:port[:rail[:plane]]],...`.

use crate::config::Warning;

use super::names::NameList;

#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    text: String,
    name: String,
    port: Option<u8>,
    rail: Option<u16>,
    plane: Option<u16>,
}

/// A parsed filter.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Filter {
    list: NameList,
    entries: Vec<Entry>,
    /// The variable was set to something.
    given: bool,
}

/// What the filter says of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    pub accepted: bool,
    pub rail: Option<u16>,
    pub plane: Option<u16>,
}

const VARIABLE: &str = "NCCL_IB_HCA";

fn number<T: std::str::FromStr>(field: Option<&str>) -> Result<Option<T>, ()> {
    match field {
        None | Some("") => Ok(None),
        Some(text) if text.bytes().all(|b| b.is_ascii_digit()) => text.parse().map(Some).map_err(|_| ()),
        Some(_) => Err(()),
    }
}

impl Filter {
    pub fn parse(text: &str) -> (Self, Vec<Warning>) {
        let (list, mut warnings) = NameList::parse(VARIABLE, text);
        let mut entries = Vec::new();
        for item in &list.items {
            let mut fields = item.split(':');
            let name = fields.next().unwrap_or("").to_owned();
            let parsed = (number(fields.next()), number(fields.next()), number(fields.next()));
            match parsed {
                (Ok(port), Ok(rail), Ok(plane)) if fields.next().is_none() && !name.is_empty() => {
                    entries.push(Entry { text: item.clone(), name, port, rail, plane });
                }
                _ => warnings.push(Warning(format!(
                    "{VARIABLE}={text}: {item:?} is ignored: it is not name[:port[:rail[:plane]]] with whole numbers"
                ))),
            }
        }
        (Self { list, entries, given: !text.trim().is_empty() }, warnings)
    }

    fn matches(&self, entry: &Entry, name: &str, port: u8) -> bool {
        self.list.names(&entry.name, name) && entry.port.is_none_or(|p| p == port)
    }

    pub fn accepts(&self, name: &str, port: u8) -> Verdict {
        let hit = self.entries.iter().find(|e| self.matches(e, name, port));
        if self.list.exclude {
            // An empty list names everything.
            return Verdict { accepted: !self.entries.is_empty() && hit.is_none(), rail: None, plane: None };
        }
        match hit {
            Some(entry) => Verdict { accepted: true, rail: entry.rail, plane: entry.plane },
            // A list of which nothing could be read must not select everything.
            None => Verdict { accepted: !self.given, rail: None, plane: None },
        }
    }

    /// Whether any port of the device may be taken; if not, it need not be opened.
    pub fn accepts_device(&self, name: &str) -> bool {
        (1..=u8::MAX).any(|port| self.accepts(name, port).accepted)
    }

    /// Entries that match nothing, or more than one would think; `ports` is everything that the machine has.
    pub fn audit(&self, ports: &[(&str, u8)]) -> Vec<Warning> {
        let mut warnings = Vec::new();
        for entry in &self.entries {
            let mut devices: Vec<&str> =
                ports.iter().filter(|(n, p)| self.matches(entry, n, *p)).map(|(n, _)| *n).collect();
            devices.dedup();
            if devices.is_empty() {
                let of_name = ports.iter().any(|(n, _)| self.list.names(&entry.name, n));
                let what = if of_name { "matches no port" } else { "matches no device" };
                let mut have: Vec<String> = ports.iter().map(|(n, p)| format!("{n}:{p}")).collect();
                have.dedup();
                warnings.push(Warning(format!("{VARIABLE}: {:?} {what}; there are {}", entry.text, have.join(", "))));
            } else if !self.list.exact && devices.len() > 1 && devices.contains(&entry.name.as_str()) {
                warnings.push(Warning(format!(
                    "{VARIABLE}: {:?} is a prefix and takes {} devices ({}); write ={} for the one",
                    entry.text,
                    devices.len(),
                    devices.join(", "),
                    entry.name
                )));
            }
        }
        warnings
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PORTS: [(&str, u8); 4] = [("mlx5_0", 1), ("mlx5_1", 1), ("mlx5_10", 1), ("mlx5_11", 1)];

    fn run(text: &str) -> (Vec<&'static str>, Vec<String>) {
        let (filter, mut warnings) = Filter::parse(text);
        let taken = PORTS.iter().filter(|(n, p)| filter.accepts(n, *p).accepted).map(|(n, _)| *n).collect();
        warnings.extend(filter.audit(&PORTS));
        (taken, warnings.into_iter().map(|w| w.0).collect())
    }

    /// The rows of a table of real mistakes: prefix surprises, misplaced signs, lenient numbers.
    #[test]
    fn rows_of_real_mistakes() {
        let all = vec!["mlx5_0", "mlx5_1", "mlx5_10", "mlx5_11"];
        assert_eq!(run(""), (all.clone(), vec![]));
        let (taken, w) = run("mlx5_1");
        assert_eq!(taken, ["mlx5_1", "mlx5_10", "mlx5_11"]);
        assert!(w.len() == 1 && w[0].contains("takes 3 devices"), "{w:?}");
        assert_eq!(run("=mlx5_1"), (vec!["mlx5_1"], vec![]));
        assert_eq!(run("^mlx5_1").0, ["mlx5_0"]);
        assert_eq!(run("^=mlx5_10,mlx5_11"), (vec!["mlx5_0", "mlx5_1"], vec![]));
        let (taken, w) = run("=mlx5_1:2");
        assert!(taken.is_empty());
        assert!(w.len() == 1 && w[0].contains("matches no port"), "{w:?}");
        let (taken, w) = run("^=mlx5_10,^=mlx5_11");
        assert_eq!(taken, ["mlx5_0", "mlx5_1", "mlx5_11"]);
        assert!(w.iter().any(|x| x.contains("^=mlx5_11")), "{w:?}");
        let (taken, w) = run("mlx5_1:8abc");
        assert!(taken.is_empty(), "a list of which nothing can be read selects nothing");
        assert!(w.len() == 1 && w[0].contains("ignored"), "{w:?}");
        assert!(run("mlx4_0").1[0].contains("matches no device"));
        assert_eq!(run("^"), (vec![], vec![]));
        assert_eq!(run("mlx5_0:0").0, Vec::<&str>::new());
    }

    #[test]
    fn rail_and_plane_come_from_the_first_match() {
        let (filter, w) = Filter::parse("=mlx5_0::3:1,mlx5_1:1:4");
        assert!(w.is_empty(), "{w:?}");
        assert_eq!(filter.accepts("mlx5_0", 1), Verdict { accepted: true, rail: Some(3), plane: Some(1) });
        assert_eq!(filter.accepts("mlx5_1", 1), Verdict { accepted: true, rail: Some(4), plane: None });
        assert!(!filter.accepts("mlx5_1", 2).accepted);
    }

    proptest! {
        #[test]
        fn exclusion_is_the_complement(names in "[a-z0-9_:,=]{0,20}") {
            prop_assume!(!Filter::parse(&names).0.entries.is_empty() && !names.starts_with('='));
            let (include, exclude) = (Filter::parse(&names).0, Filter::parse(&format!("^{names}")).0);
            for (n, p) in PORTS {
                prop_assert_ne!(include.accepts(n, p).accepted, exclude.accepts(n, p).accepted);
            }
        }

        #[test]
        fn no_text_panics(text in ".{0,60}") {
            let (filter, _) = Filter::parse(&text);
            filter.accepts("mlx5_0", 1);
            filter.audit(&PORTS);
        }
    }
}
