//! What was measured, put together: the table, the rules, the profile.

use std::collections::HashMap;

use comfy_table::presets;
use nccl_net_rdma::memory::profile::{Figures, Measured, Rule, Way, derive_rules};

use super::measure::Row;
use super::plot::{Point, Series};
use crate::perf::gigabytes;

/// All paths, in the order in which they are shown.
pub(super) const WAYS: [Way; 3] = [Way::Staging, Way::Gdr, Way::Host];

/// Times that each byte of a message crosses PCIe at one side, from the copies that the path makes.
pub(super) fn pcie_crossings(way: Way) -> f64 {
    match way {
        // GPU to NIC.
        Way::Gdr => 1.0,
        // GPU to host memory, host memory to NIC; with Host NCCL's kernels are the ones to write there.
        Way::Staging | Way::Host => 2.0,
    }
}

/// Messages of one size by one path, a figure from each turn.
#[derive(Debug, Default)]
struct Cell {
    p50: Vec<f64>,
    p99: Vec<f64>,
    streaming: Vec<f64>,
    /// Of sender and receiver.
    cpu: [Vec<f64>; 2],
}

/// The medians of a cell.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Summary {
    pub(super) p50_us: f64,
    pub(super) p99_us: Option<f64>,
    pub(super) gb_s: f64,
    pub(super) gb_s_least: f64,
    pub(super) gb_s_most: f64,
    /// CPU time for a message.
    pub(super) cpu_us: [f64; 2],
    /// Part of a core at the bandwidth above.
    pub(super) cpu_share: [f64; 2],
}

#[derive(Debug, Default)]
pub(super) struct Results {
    cells: HashMap<(usize, Way), Cell>,
    pub(super) wrong: u64,
}

impl Results {
    pub(super) fn add(&mut self, way: Way, rank: usize, row: &Row) {
        self.wrong += row.wrong;
        let cell = self.cells.entry((row.bytes, way)).or_default();
        if let Some(cpu) = cell.cpu.get_mut(rank) {
            cpu.push(row.cpu);
        }
        if let Some(times) = row.times {
            cell.p50.push(times.p50);
            cell.p99.extend(times.p99);
            cell.streaming.push(times.streaming);
        }
    }

    pub(super) fn summary(&self, bytes: usize, way: Way) -> Option<Summary> {
        let cell = self.cells.get(&(bytes, way))?;
        #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
        let gb_s = |seconds: f64| bytes as f64 / seconds / 1e9;
        let streaming = median(&cell.streaming)?;
        // Not before: the median of what is cut off at 0 is too high.
        let cpu = [median(&cell.cpu[0])?.max(0.0), median(&cell.cpu[1])?.max(0.0)];
        Some(Summary {
            p50_us: median(&cell.p50)? * 1e6,
            // Of all turns, as the median is: one of the fast ones alone might be below that.
            p99_us: median(&cell.p99).filter(|_| cell.p99.len() == cell.p50.len()).map(|seconds| seconds * 1e6),
            gb_s: gb_s(streaming),
            gb_s_least: gb_s(cell.streaming.iter().copied().fold(0.0, f64::max)),
            gb_s_most: gb_s(cell.streaming.iter().copied().fold(f64::INFINITY, f64::min)),
            cpu_us: cpu.map(|seconds| seconds * 1e6),
            cpu_share: cpu.map(|seconds| seconds / streaming),
        })
    }

    /// Sizes of which there is anything, rising.
    pub(super) fn sizes(&self) -> Vec<usize> {
        let mut sizes: Vec<_> = self.cells.keys().map(|(bytes, _)| *bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    pub(super) fn ways(&self) -> Vec<Way> {
        let has = |way: &Way| self.sizes().iter().any(|&bytes| self.summary(bytes, *way).is_some());
        WAYS.into_iter().filter(has).collect()
    }

    pub(super) fn table(&self) -> String {
        let ways = self.ways();
        let mut table = comfy_table::Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        let heads = ways.iter().flat_map(|way| {
            ["us, median (p99)", "GB/s (min..max)", "CPU %, send/recv", "PCIe"].map(|name| format!("{way}: {name}"))
        });
        table.set_header(std::iter::once("size (B)".to_owned()).chain(heads));
        for bytes in self.sizes() {
            let mut cells = vec![bytes.to_string()];
            for &way in &ways {
                cells.extend(self.summary(bytes, way).map_or_else(|| ["-"; 4].map(str::to_owned), |s| s.cells(way)));
            }
            table.add_row(cells);
        }
        table.to_string()
    }

    pub(super) fn measured(&self) -> Vec<Measured> {
        let measured = |bytes: usize| {
            let of = |way| self.summary(bytes, way).map(|summary| summary.figures(way));
            let (gdr, staging, host) = (of(Way::Gdr), of(Way::Staging), of(Way::Host));
            Measured { bytes: u64::try_from(bytes).unwrap_or(u64::MAX), gdr, staging, host }
        };
        self.sizes().into_iter().map(measured).collect()
    }

    /// What `auto` will make of it. The figures of host memory are the NIC's part alone, the least that this path can cost:
    /// staging that beats them is better, but GPUDirect that does not is not worse.
    pub(super) fn rules(&self) -> Vec<Rule> {
        let mut measured = self.measured();
        if measured.iter().any(|size| size.gdr.is_some()) {
            measured.iter_mut().for_each(|size| size.host = None);
        }
        derive_rules(&measured)
    }

    pub(super) fn series(&self) -> Vec<Series> {
        let series = |way: Way| {
            let point = |bytes| {
                let summary = self.summary(bytes, way)?;
                let figures = summary.figures(way);
                Some(Point {
                    bytes,
                    latency_us: figures.latency_us,
                    gb_s: figures.gb_s,
                    cpu_percent: figures.cpu_share * 100.0,
                    pcie_gb_s: figures.gb_s * figures.pcie_bytes_per_byte,
                })
            };
            Series { name: way.to_string(), points: self.sizes().into_iter().filter_map(point).collect() }
        };
        self.ways().into_iter().map(series).collect()
    }
}

impl Summary {
    fn figures(&self, way: Way) -> Figures {
        Figures {
            latency_us: self.p50_us,
            gb_s: self.gb_s,
            cpu_share: self.cpu_share[0].max(self.cpu_share[1]),
            pcie_bytes_per_byte: pcie_crossings(way),
        }
    }

    fn cells(&self, way: Way) -> [String; 4] {
        let p99 = self.p99_us.map_or_else(|| "-".to_owned(), |us| format!("{us:.2}"));
        let [send, recv] = self.cpu_share.map(|share| share * 100.0);
        [
            format!("{:.2} ({p99})", self.p50_us),
            format!("{} ({}..{})", gigabytes(self.gb_s), gigabytes(self.gb_s_least), gigabytes(self.gb_s_most)),
            format!("{send:.1}/{recv:.1}"),
            format!("{:.0}x", pcie_crossings(way)),
        ]
    }
}

/// Rules in words.
pub(super) fn rules_in_words(rules: &[Rule]) -> String {
    let words = rules.iter().map(|rule| match rule.to {
        Some(to) => format!("{} from {} B to below {to} B", rule.path, rule.from),
        None if rule.from == 0 => format!("{} for all sizes", rule.path),
        None => format!("{} from {} B on", rule.path, rule.from),
    });
    words.collect::<Vec<_>>().join(", ")
}

/// The middle one; of an even number the mean of the middle two.
fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted.get(sorted.len().checked_sub(1)? / 2)?, sorted.get(sorted.len() / 2)?);
    Some(f64::midpoint(*low, *high))
}

#[cfg(test)]
mod tests {
    use super::super::measure::Times;
    use super::*;

    fn row(bytes: usize, cpu: f64, times: Option<(f64, f64, f64)>) -> Row {
        let times = times.map(|(p50, p99, streaming)| Times { p50, p99: Some(p99), streaming });
        Row { bytes, wrong: 0, cpu, times }
    }

    /// Both ranks' rows of a turn.
    fn turn(results: &mut Results, way: Way, bytes: usize, us: f64) {
        results.add(way, 0, &row(bytes, us * 1e-7, Some((us * 1e-6, us * 2e-6, us * 1e-6))));
        results.add(way, 1, &row(bytes, us * 3e-7, None));
    }

    #[test]
    fn figures_are_medians_over_the_turns() {
        let mut results = Results::default();
        [4.0, 2.0, 100.0].into_iter().for_each(|us| turn(&mut results, Way::Gdr, 4000, us));
        let got = results.summary(4000, Way::Gdr).unwrap();
        let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
        assert!(near(got.p50_us, 4.0) && near(got.p99_us.unwrap(), 8.0), "{got:?}");
        assert!(near(got.gb_s, 1.0) && near(got.gb_s_least, 0.04) && near(got.gb_s_most, 2.0), "{got:?}");
        // Of 4 us for a message the sender's CPU works 0.4 and the receiver's 1.2.
        assert!(near(got.cpu_share[0], 0.1) && near(got.cpu_share[1], 0.3), "{got:?}");
        assert!(near(got.figures(Way::Gdr).cpu_share, 0.3));
        assert_eq!(results.summary(4000, Way::Staging), None);
        assert_eq!(median(&[]), None);
    }

    /// A message of 8 bytes costs next to nothing, and what is taken off for idle turns is as uncertain.
    #[test]
    fn cpu_time_is_cut_off_at_zero_after_the_median() {
        let mut results = Results::default();
        for cpu in [-3e-7, -1e-7, 2e-7, 4e-7] {
            results.add(Way::Host, 0, &row(8, cpu, Some((1e-6, 2e-6, 1e-6))));
            results.add(Way::Host, 1, &row(8, -cpu, None));
        }
        let [send, recv] = results.summary(8, Way::Host).unwrap().cpu_share;
        assert!((send - 0.05).abs() < 1e-9 && recv.abs() < 1e-9, "{send} {recv}");
    }

    #[test]
    fn the_largest_of_a_few_is_no_percentile() {
        let mut results = Results::default();
        let few = Row { times: Some(Times { p50: 1e-6, p99: None, streaming: 1e-6 }), ..row(8, 0.0, None) };
        results.add(Way::Host, 0, &few);
        results.add(Way::Host, 1, &row(8, 0.0, None));
        assert!(results.table().contains("| 1.00 (-) "), "{}", results.table());
        results.add(Way::Host, 0, &row(8, 0.0, Some((1e-6, 1e-6, 1e-6))));
        assert!(results.table().contains("| 1.00 (-) "), "{}", results.table());
    }

    #[test]
    fn a_turn_that_one_rank_did_not_finish_is_no_figure() {
        let mut results = Results::default();
        results.add(Way::Host, 0, &row(8, 1e-6, Some((1e-6, 1e-6, 1e-6))));
        assert_eq!(results.summary(8, Way::Host), None);
        assert!(results.ways().is_empty());
    }

    #[test]
    fn table_rules_and_series_show_each_path_that_was_measured() {
        let mut results = Results::default();
        for (bytes, staging, gdr) in [(8, 12.0, 3.0), (1 << 20, 30.0, 60.0)] {
            turn(&mut results, Way::Staging, bytes, staging);
            turn(&mut results, Way::Gdr, bytes, gdr);
        }
        turn(&mut results, Way::Gdr, 64, 3.0);
        assert_eq!(rules_in_words(&results.rules()), "gdr from 0 B to below 1048576 B, staging from 1048576 B on");
        let table = results.table();
        let line = |size: &str| table.lines().find(|line| line.starts_with(&format!("| {size} "))).unwrap().to_owned();
        assert!(line("8").contains("12.00 (24.00)") && line("8").contains("3.00 (6.00)"), "{table}");
        assert!(line("8").contains("10.0/30.0") && line("8").contains("| 2x") && line("8").contains("| 1x"), "{table}");
        assert!(line("64").contains("| - "), "{table}");
        assert!(!table.contains("host"), "{table}");
        let series = results.series();
        assert_eq!(
            series.iter().map(|s| (s.name.as_str(), s.points.len())).collect::<Vec<_>>(),
            [("staging", 2), ("gdr", 3)]
        );
        let last = series[0].points[1];
        assert!((last.pcie_gb_s / last.gb_s - 2.0).abs() < 1e-9, "staging crosses PCIe twice");
        assert_eq!(results.measured().len(), 3);
    }

    #[test]
    fn host_memory_alone_does_not_displace_gpudirect() {
        let mut results = Results::default();
        turn(&mut results, Way::Host, 8, 1.0);
        turn(&mut results, Way::Staging, 8, 12.0);
        assert_eq!(rules_in_words(&results.rules()), "host for all sizes");
        turn(&mut results, Way::Gdr, 8, 3.0);
        assert_eq!(rules_in_words(&results.rules()), "gdr for all sizes");
        assert!(results.measured()[0].host.is_some(), "the profile has the figure all the same");
    }
}
