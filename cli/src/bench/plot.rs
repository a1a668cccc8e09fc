//! The figures as pictures: one drawing, written as SVG and as PNG.

use anyhow::anyhow;
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

/// What is drawn.
#[derive(Clone, Debug)]
pub(super) struct Chart {
    pub(super) title: String,
    pub(super) subtitle: String,
    pub(super) series: Vec<Series>,
    /// Sizes at which another path becomes the best, and which.
    pub(super) crossovers: Vec<(u64, String)>,
}

/// A path.
#[derive(Clone, Debug)]
pub(super) struct Series {
    pub(super) name: String,
    pub(super) points: Vec<Point>,
}

/// What of a point a panel shows.
type Value = fn(&Point) -> f64;

#[derive(Clone, Copy, Debug)]
pub(super) struct Point {
    pub(super) bytes: usize,
    pub(super) latency_us: f64,
    pub(super) gb_s: f64,
    pub(super) cpu_percent: f64,
    pub(super) pcie_gb_s: f64,
}

const SIZE: (u32, u32) = (1200, 900);
/// Told apart also by those who see colours differently.
const COLOURS: [(&str, RGBColor); 3] =
    [("staging", RGBColor(230, 159, 0)), ("gdr", RGBColor(0, 158, 115)), ("host", RGBColor(0, 114, 178))];
const TEXT: &str = "sans-serif";

impl Chart {
    pub(super) fn svg(&self) -> anyhow::Result<String> {
        font()?;
        let mut text = String::new();
        self.draw(&SVGBackend::with_string(&mut text, SIZE).into_drawing_area())?;
        Ok(text)
    }

    pub(super) fn png(&self) -> anyhow::Result<Vec<u8>> {
        font()?;
        let (width, height) = SIZE;
        let mut pixels = vec![0; usize::try_from(width * height)? * 3];
        self.draw(&BitMapBackend::with_buffer(&mut pixels, SIZE).into_drawing_area())?;
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, width, height);
        encoder.set_color(png::ColorType::Rgb);
        let mut writer = encoder.write_header()?;
        writer.write_image_data(&pixels)?;
        writer.finish()?;
        Ok(file)
    }

    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> anyhow::Result<()> {
        // The error's type borrows the backend.
        self.panels(area).map_err(|error| anyhow!("no picture: {error}"))
    }

    fn panels<B: DrawingBackend>(
        &self,
        area: &DrawingArea<B, Shift>,
    ) -> Result<(), DrawingAreaErrorKind<B::ErrorType>> {
        area.fill(&WHITE)?;
        // A title is set against the edge, and its letters reach over it.
        let area = area.margin(8, 0, 0, 0).titled(&self.title, (TEXT, 24))?;
        let area = area.titled(&self.subtitle, (TEXT, 15))?;
        let cells = area.split_evenly((2, 2));
        let panels: [(&str, Value, bool); 4] = [
            ("latency, one way (us)", |p| p.latency_us, true),
            ("bandwidth (GB/s)", |p| p.gb_s, false),
            ("CPU beyond polling, busier side (% of a core)", |p| p.cpu_percent, false),
            ("PCIe traffic of one side (GB/s)", |p| p.pcie_gb_s, false),
        ];
        for (cell, (name, value, log)) in cells.iter().zip(panels) {
            let (low, high) = self.range(value);
            if log {
                let ends = (low / 1.5, high * 1.5);
                self.panel(cell, name, value, (ends.0..ends.1).log_scale(), ends)?;
            } else {
                let ends = (0.0, high * 1.1);
                self.panel(cell, name, value, ends.0..ends.1, ends)?;
            }
        }
        area.present()
    }

    fn panel<B: DrawingBackend, Y>(
        &self,
        cell: &DrawingArea<B, Shift>,
        name: &str,
        value: Value,
        y: Y,
        (bottom, top): (f64, f64),
    ) -> Result<(), DrawingAreaErrorKind<B::ErrorType>>
    where
        Y: AsRangedCoord<Value = f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        let points = || self.series.iter().flat_map(|series| &series.points).map(|point| log2(point.bytes));
        let (first, last) = (points().fold(f64::INFINITY, f64::min), points().fold(0.0, f64::max));
        let x = first.min(last) - 0.5..last + 0.5;
        let mut chart = ChartBuilder::on(cell)
            .caption(name, (TEXT, 17))
            .margin(10)
            .x_label_area_size(34)
            .y_label_area_size(64)
            .build_cartesian_2d(x, y)?;
        chart
            .configure_mesh()
            .x_labels(13)
            .x_label_formatter(&|x| size_name(*x))
            .y_label_formatter(&|y| short(*y))
            .x_desc("message size (B)")
            .label_style((TEXT, 13))
            .light_line_style(WHITE)
            .draw()?;
        for (at, name) in &self.crossovers {
            let x = log2(usize::try_from(*at).unwrap_or(usize::MAX));
            // No dashes: plotters measures those with a function that glibc 2.34 has not got (hypotf, of 2.35).
            chart.draw_series([PathElement::new([(x, bottom), (x, top)], BLACK.stroke_width(1))])?;
            let label = Text::new(format!(" {name} from {} B", size_name(x)), (x, top), (TEXT, 13));
            chart.draw_series([label])?;
        }
        for series in &self.series {
            // The same in every picture, whatever else is in it.
            let colour = COLOURS.iter().find(|(name, _)| *name == series.name).map_or(BLACK, |(_, colour)| *colour);
            let line = || series.points.iter().map(|point| (log2(point.bytes), value(point)));
            chart
                .draw_series(LineSeries::new(line(), colour.stroke_width(2)))?
                .label(&series.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(3)));
            chart.draw_series(line().map(|at| Circle::new(at, 3, colour.filled())))?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK)
            .label_font((TEXT, 14))
            .draw()
    }

    /// The least and the most above 0; something to draw where there is none.
    fn range(&self, value: Value) -> (f64, f64) {
        let values = self.series.iter().flat_map(|series| &series.points).map(value).filter(|value| *value > 0.0);
        let range = values.fold(None, |range: Option<(f64, f64)>, value| {
            range.map_or(Some((value, value)), |(least, most)| Some((least.min(value), most.max(value))))
        });
        range.unwrap_or((1.0, 1.0))
    }
}

/// Pictures have letters on any machine: the font is in the program.
fn font() -> anyhow::Result<()> {
    plotters::style::register_font(TEXT, FontStyle::Normal, dejavu::sans::regular())
        .map_err(|_| anyhow!("the font is damaged"))
}

#[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
fn log2(bytes: usize) -> f64 {
    (bytes.max(1) as f64).log2()
}

/// The size whose logarithm this is: 512, 64K, 1M.
fn size_name(log2: f64) -> String {
    let (unit, scale) = match log2 {
        x if x < 10.0 => ("", 0.0),
        x if x < 20.0 => ("K", 10.0),
        x if x < 30.0 => ("M", 20.0),
        _ => ("G", 30.0),
    };
    format!("{:.0}{unit}", (log2 - scale).exp2())
}

/// A value with as many digits as an axis needs.
fn short(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart() -> Chart {
        let points = |slow: f64| {
            let point = |log: u32| {
                let bytes = 1_usize << log;
                let size = f64::from(1_u32 << log);
                let latency_us = slow + size / 40_000.0;
                let gb_s = size / latency_us / 1e3;
                Point { bytes, latency_us, gb_s, cpu_percent: slow * 3.0, pcie_gb_s: gb_s * 2.0 }
            };
            (3..=26).map(point).collect()
        };
        let series = [("staging", 12.0), ("gdr", 3.0), ("host", 2.0)];
        Chart {
            title: "a NIC and a GPU".to_owned(),
            subtitle: "made up".to_owned(),
            series: series.map(|(name, slow)| Series { name: name.to_owned(), points: points(slow) }).into(),
            crossovers: vec![(1 << 20, "staging".to_owned())],
        }
    }

    #[test]
    fn both_files_hold_the_same_drawing() {
        let svg = chart().svg().unwrap();
        assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
        for text in ["staging", "gdr", "host", "latency, one way (us)", "staging from 1M B", "64K", "made up"] {
            assert!(svg.contains(text), "{text} is not in the SVG");
        }
        // Each path is a line of 24 points in each of 4 panels.
        assert_eq!(svg.matches("<circle").count(), 3 * 4 * 24);
        let file = chart().png().unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(&file)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut pixels).unwrap();
        assert_eq!((reader.info().width, reader.info().height), SIZE);
        let (pixels, _) = pixels.as_chunks::<3>();
        // Nothing is cut off at the top.
        let rows = usize::try_from(SIZE.0).unwrap() * 4;
        assert!(pixels[..rows].iter().all(|pixel| *pixel == [255; 3]));
        for (_, RGBColor(r, g, b)) in COLOURS {
            assert!(pixels.contains(&[r, g, b]), "a path is not in the PNG");
        }
    }

    #[test]
    fn a_single_path_without_cpu_time_can_be_drawn() {
        let mut chart = chart();
        chart.series.truncate(1);
        chart.series[0].points.truncate(1);
        chart.series[0].points[0].cpu_percent = 0.0;
        chart.crossovers.clear();
        assert_eq!(chart.svg().unwrap().matches("<circle").count(), 4);
        chart.png().unwrap();
    }

    #[test]
    fn sizes_are_named_as_people_type_them() {
        assert_eq!([3.0, 9.0, 16.0, 20.0, 26.0, 30.0].map(size_name), ["8", "512", "64K", "1M", "64M", "1G"]);
        assert_eq!([0.0, 0.25, 2.5, 41.0].map(short), ["0", "0.25", "2.5", "41"]);
    }
}
