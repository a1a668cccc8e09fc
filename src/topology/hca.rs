//! `NCCL_IB_HCA`: which devices and ports to use, `[^][=]name[:port[:rail[:plane]]],...`.

use crate::config::Warning;

use super::names::NameList;

#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    text: String,
    name: String,
    port: Option<u8>,
    rail: Option<i16>,
    plane: Option<i16>,
}

/// A parsed filter.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Filter {
    list: NameList,
    entries: Vec<Entry>,
    /// An item was ignored. If nothing else is left, the list must not turn into its opposite.
    damaged: bool,
}

/// What the filter says of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    pub accepted: bool,
    pub rail: Option<i16>,
    pub plane: Option<i16>,
}

const VARIABLE: &str = "NCCL_IB_HCA";

/// A field of an item; absent, empty and -1 mean any. No signs, leading zeros or trailing junk.
fn number<T: std::str::FromStr>(field: Option<&str>) -> Result<Option<T>, ()> {
    match field {
        None | Some("" | "-1") => Ok(None),
        Some(text) if text.bytes().all(|b| b.is_ascii_digit()) && (text == "0" || !text.starts_with('0')) => {
            text.parse().map(Some).map_err(|_| ())
        }
        Some(_) => Err(()),
    }
}

/// "mlx5_1" goes on in "mlx5_10" but not in "mlx5_bond": another device, which the prefix takes too.
fn counts_on(prefix: &str, name: &str) -> bool {
    let digit = |c: Option<char>| c.is_some_and(|c| c.is_ascii_digit());
    digit(prefix.chars().next_back()) && digit(name.strip_prefix(prefix).and_then(|rest| rest.chars().next()))
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
        let damaged = !warnings.is_empty();
        if list.exclude && entries.is_empty() && !damaged {
            warnings.push(Warning(format!("{VARIABLE}={text}: ^ without a name excludes every device")));
        }
        (Self { list, entries, damaged }, warnings)
    }

    fn matches(&self, entry: &Entry, name: &str, port: u8) -> bool {
        self.list.names(&entry.name, name) && entry.port.is_none_or(|p| p == port)
    }

    pub fn accepts(&self, name: &str, port: u8) -> Verdict {
        let hit = self.entries.iter().find(|e| self.matches(e, name, port));
        // An empty list names everything; one of which nothing could be read names nothing.
        let named = hit.is_some() || self.entries.is_empty() && !self.damaged;
        match hit {
            Some(entry) if !self.list.exclude => Verdict { accepted: true, rail: entry.rail, plane: entry.plane },
            _ => Verdict { accepted: named != self.list.exclude, rail: None, plane: None },
        }
    }

    /// Whether any port of the device may be taken; if not, it need not be opened.
    pub fn accepts_device(&self, name: &str) -> bool {
        (1..=u8::MAX).any(|port| self.accepts(name, port).accepted)
    }

    /// Entries that match nothing, or more than one would think; `ports` is everything that the machine has. A prefix that
    /// stands for a family ("mlx5") is meant so; one that is a device's name, or counts on in others, rarely is.
    pub fn audit(&self, ports: &[(&str, u8)]) -> Vec<Warning> {
        let mut warnings = Vec::new();
        let have = match ports {
            [] => "none".to_owned(),
            _ => ports.iter().map(|(n, p)| format!("{n}:{p}")).collect::<Vec<_>>().join(", "),
        };
        for entry in &self.entries {
            let mut devices: Vec<&str> =
                ports.iter().filter(|(n, p)| self.matches(entry, n, *p)).map(|(n, _)| *n).collect();
            devices.sort_unstable();
            devices.dedup();
            let stretched = !self.list.exact
                && devices
                    .iter()
                    .any(|d| *d != entry.name && (devices.contains(&entry.name.as_str()) || counts_on(&entry.name, d)));
            if devices.is_empty() {
                let of_name = ports.iter().any(|(n, _)| self.list.names(&entry.name, n));
                let what = if of_name { "matches no port" } else { "matches no device" };
                warnings.push(Warning(format!("{VARIABLE}: {:?} {what}; there are {have}", entry.text)));
            } else if stretched {
                warnings.push(Warning(format!(
                    "{VARIABLE}: {:?} is a prefix and takes {} devices ({}); write {}={} for the one",
                    entry.text,
                    devices.len(),
                    devices.join(", "),
                    if self.list.exclude { "^" } else { "" },
                    entry.text
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
        let (taken, w) = run("^");
        assert!(taken.is_empty() && w.len() == 1 && w[0].contains("excludes every device"), "{w:?}");
        assert_eq!(run("mlx5_0:0").0, Vec::<&str>::new());
    }

    /// What is ignored neither selects nor excludes everything; a list without items is none.
    #[test]
    fn a_damaged_list_does_not_turn_into_its_opposite() {
        for (text, devices) in [("^mlx5_1:8abc", 4), ("==mlx5_0", 0), ("=^mlx5_0", 0), ("=", 4), (",", 4), ("^", 0)] {
            assert_eq!(run(text).0.len(), devices, "{text}");
        }
        for text in ["mlx5_1:08", "mlx5_1:256", "mlx5_1:+1", "mlx5_1:1:2:3:4", ":1", "mlx5_1: 1"] {
            let (taken, w) = run(text);
            assert!(taken.is_empty() && w.len() == 1, "{text}: {taken:?} {w:?}");
        }
        assert_eq!(run("=mlx5_1:-1"), (vec!["mlx5_1"], vec![]));
    }

    /// A prefix is told where it counts on, even if no device has just that name, and not where it stands for a family.
    #[test]
    fn prefixes_that_take_more_than_meant_are_told() {
        let audit = |text: &str, ports: &[(&str, u8)]| Filter::parse(text).0.audit(ports);
        assert_eq!(audit("mlx5", &PORTS), []);
        let w = audit("^mlx5_1", &PORTS[2..]);
        assert!(w.len() == 1 && w[0].0.contains("takes 2 devices") && w[0].0.contains("write ^=mlx5_1 "), "{w:?}");
        assert_eq!(audit("mlx5_0", &[("mlx5_0", 1), ("mlx5_9", 1), ("mlx5_0", 2)]), []);
        assert!(audit("mlx5_0", &[])[0].0.ends_with("there are none"));
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
            prop_assume!(!names.starts_with('='));
            let (include, exclude) = (Filter::parse(&names).0, Filter::parse(&format!("^{names}")).0);
            for (n, p) in PORTS {
                prop_assert_ne!(include.accepts(n, p).accepted, exclude.accepts(n, p).accepted);
            }
        }

        #[test]
        fn an_exact_list_takes_no_more_than_its_prefixes(names in "[a-z0-9_:,]{0,20}|mlx5_[01]{1,2}(:[12])?") {
            let (prefix, exact) = (Filter::parse(&names).0, Filter::parse(&format!("={names}")).0);
            for (n, p) in PORTS {
                prop_assert!(prefix.accepts(n, p).accepted || !exact.accepts(n, p).accepted);
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
