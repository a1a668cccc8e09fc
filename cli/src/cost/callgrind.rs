//! Reads a profile in callgrind's output format, as much of it as `--separate-callers --dump-line=yes
//! --compress-strings=no --compress-pos=no` makes: the instructions of each source line, with the chain of callers.

use anyhow::Context as _;

/// Instructions of one source line, called one way.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Line<'a> {
    pub(super) object: &'a str,
    /// Where the instructions come from, also where inlined.
    pub(super) file: &'a str,
    pub(super) line: u64,
    /// The function, then its callers, nearest first.
    pub(super) chain: &'a str,
    pub(super) instructions: u64,
}

/// Calls `each` for every line of the profile.
pub(super) fn read<'a>(profile: &'a str, mut each: impl FnMut(&Line<'a>)) -> anyhow::Result<()> {
    let mut at = Line { object: "", file: "", line: 0, chain: "", instructions: 0 };
    let mut lines = profile.lines();
    while let Some(text) = lines.next() {
        if text.starts_with(|c: char| c.is_ascii_digit()) {
            let (line, count) = text.split_once(' ').with_context(|| format!("a cost without a count: {text:?}"))?;
            at.line = line.parse().with_context(|| format!("a line number: {text:?}"))?;
            at.instructions = count.trim().parse().with_context(|| format!("a count: {text:?}"))?;
            each(&at);
        } else if let Some((key, value)) = text.split_once('=') {
            match key {
                "ob" => at.object = value,
                "fl" | "fi" | "fe" => at.file = value,
                "fn" => at.chain = value,
                // The next line is what the callee costs, which has lines of its own.
                "calls" => drop(lines.next()),
                _ => {}
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROFILE: &str = "\
# callgrind format
version: 1
cmd:  nccl-rdma
positions: line
events: Ir
summary: 30

ob=/lib/plugin.so
fl=/src/v8.rs
fn=isend'measured::isend
10 3
fi=/src/sender.rs
20 4
cob=/lib/adapter.so
cfi=/hca/verbs.rs
cfn=post_send'isend'measured::isend
calls=1 50
21 23
fe=/src/v8.rs
11 1

totals: 30
";

    #[test]
    fn own_costs_are_read_with_their_place_and_callees_are_not_counted_twice() {
        let mut seen = Vec::new();
        read(PROFILE, |l| seen.push((l.object, l.file, l.line, l.chain, l.instructions))).unwrap();
        let chain = "isend'measured::isend";
        let line = |file, line, count| ("/lib/plugin.so", file, line, chain, count);
        assert_eq!(seen, [line("/src/v8.rs", 10, 3), line("/src/sender.rs", 20, 4), line("/src/v8.rs", 11, 1)]);
    }

    #[test]
    fn what_is_no_profile_is_refused() {
        assert!(read("10\n", |_| ()).is_err());
        assert!(read("10 x\n", |_| ()).is_err());
    }
}
