//! Tables on the terminal: rows of fixed columns that can be printed one by one while a long run goes on; and
//! what is typed for the command's options.

use clap::builder::{RangedI64ValueParser, RangedU64ValueParser};

/// The columns of a table: heading and width, right-aligned unless the width is negative.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table(pub &'static [(&'static str, i32)]);

impl Table {
    pub(crate) fn head(&self) -> String {
        self.line(self.0.iter().map(|(name, _)| (*name).to_owned()))
    }

    pub(crate) fn row<const N: usize>(&self, cells: [String; N]) -> String {
        self.line(cells)
    }

    fn line(&self, cells: impl IntoIterator<Item = String>) -> String {
        let cells = self.0.iter().zip(cells).map(|((_, width), cell)| {
            let columns = usize::try_from(width.unsigned_abs()).unwrap_or(0);
            if *width < 0 { format!("{cell:<columns$}") } else { format!("{cell:>columns$}") }
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    }
}

/// The columns of the all-reduce tables, after those of nccl-tests.
pub(crate) const ALL_REDUCE: Table = Table(&[
    ("size (B)", 12),
    ("count", 12),
    ("type", 6),
    ("redop", 6),
    ("time (us)", 10),
    ("algbw (GB/s)", 12),
    ("busbw (GB/s)", 12),
    ("#wrong", 8),
]);

/// One row of [`ALL_REDUCE`]: `seconds` is the time of one operation.
pub(crate) fn all_reduce_row(bytes: usize, kind: &str, ranks: usize, seconds: f64, wrong: u64) -> String {
    let (alg, bus) = bandwidths(bytes, ranks, seconds);
    ALL_REDUCE.row([
        bytes.to_string(),
        (bytes / 4).to_string(),
        kind.to_owned(),
        "sum".to_owned(),
        format!("{:.1}", seconds * 1e6),
        format!("{alg:.3}"),
        format!("{bus:.3}"),
        wrong.to_string(),
    ])
}

/// Algorithm and bus bandwidth in GB/s: an all-reduce moves 2(n-1)/n of the bytes over each link.
#[expect(clippy::cast_precision_loss, reason = "sizes and ranks are far below 2^53")]
pub(crate) fn bandwidths(bytes: usize, ranks: usize, seconds: f64) -> (f64, f64) {
    let alg = bytes as f64 / seconds.max(1e-9) / 1e9;
    (alg, alg * 2.0 * (ranks as f64 - 1.0) / ranks as f64)
}

/// Bytes with the suffixes that people type: 8, 64K, 8M, 1G.
pub(crate) fn parse_bytes(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let scale = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 1,
        "K" | "KI" | "KIB" => 1 << 10,
        "M" | "MI" | "MIB" => 1 << 20,
        "G" | "GI" | "GIB" => 1 << 30,
        other => return Err(format!("unknown suffix {other:?}; use K, M or G")),
    };
    let number: usize = digits.parse().map_err(|error| format!("{text:?} is not a size: {error}"))?;
    number.checked_mul(scale).filter(|&n| n <= 1 << 30).ok_or_else(|| format!("{text}: more than 1 GiB"))
}

/// A limit in seconds, up to a day.
pub(crate) fn seconds() -> RangedU64ValueParser {
    RangedU64ValueParser::new().range(1..=86_400)
}

/// The number of a device.
pub(crate) fn index() -> RangedI64ValueParser<i32> {
    RangedI64ValueParser::new().range(0..)
}

/// `from`, twice that, ... up to `to`.
pub(crate) fn doubling(from: usize, to: usize) -> Vec<usize> {
    std::iter::successors(Some(from.max(1)), |n| n.checked_mul(2)).take_while(|&n| n <= to).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_suffixes_and_refused_with_a_reason() {
        assert_eq!(parse_bytes("8"), Ok(8));
        assert_eq!(parse_bytes("64K"), Ok(65536));
        assert_eq!(parse_bytes("8MiB"), Ok(8 << 20));
        assert_eq!(parse_bytes("1G"), Ok(1 << 30));
        assert!(parse_bytes("2G").unwrap_err().contains("1 GiB"));
        assert!(parse_bytes("8Q").unwrap_err().contains("suffix"));
        assert!(parse_bytes("").is_err());
        assert_eq!(doubling(8, 64), [8, 16, 32, 64]);
    }

    #[test]
    fn bus_bandwidth_counts_both_phases() {
        let (alg, bus) = bandwidths(1_000_000_000, 4, 1.0);
        assert!((alg - 1.0).abs() < 1e-9 && (bus - 1.5).abs() < 1e-9);
    }

    #[test]
    fn columns_line_up() {
        const T: Table = Table(&[("name", -6), ("n", 4)]);
        assert_eq!(T.head(), "name       n");
        assert_eq!(T.row(["ab".to_owned(), "12".to_owned()]), "ab        12");
    }
}
