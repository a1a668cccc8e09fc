//! `nccl-rdma cost`: instructions per message and per call, counted by callgrind over soft-hca's null engine, in which
//! everything that an adapter does happens inside the call. Counts are the same on every run of the same binaries.

mod callgrind;
mod driver;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::iter;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

use crate::table::Table;
use driver::{MEASURED, MESSAGES, SETTINGS, Setting};

#[derive(Debug, clap::Args)]
pub(crate) struct CostArgs {
    /// The plugin, built with line tables and symbols
    #[arg(long, value_name = "PATH")]
    plugin: PathBuf,
    /// soft-hca's libibverbs, built likewise
    #[arg(long, value_name = "PATH")]
    adapter: PathBuf,
    /// The figures to compare with
    #[arg(long, value_name = "FILE")]
    committed: PathBuf,
    /// Write the figures there
    #[arg(long)]
    save: bool,
    /// Only the settings whose name has this in it
    #[arg(long, value_name = "TEXT", default_value = "", conflicts_with = "save")]
    only: String,
    /// Another plugin to count beside it, both by the newest version of the interface that they know, as NCCL would
    #[arg(long, value_name = "PATH")]
    peer: Option<PathBuf>,
    /// Run one setting and count nothing: what callgrind looks at
    #[arg(long, hide = true, value_name = "SETTING")]
    drive: Option<String>,
    /// By the newest version that the plugin knows
    #[arg(long, hide = true)]
    newest: bool,
}

/// Whose instructions they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Split {
    plugin: f64,
    adapter: f64,
    /// Copying of the message's bytes, which an adapter in hardware does by itself.
    #[serde(skip)]
    copy: f64,
    #[serde(skip)]
    driver: f64,
}

/// The figures of one setting.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct Figures {
    /// Per call, by kind.
    calls: BTreeMap<String, Split>,
    /// Both ends, without what was asked in vain.
    message: Split,
    /// The plugin's part of a message by the function in whose source the instructions stand, also where inlined.
    functions: BTreeMap<String, f64>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Committed {
    /// Other compilers make other code.
    compiler: String,
    settings: BTreeMap<String, Figures>,
}

pub(crate) fn run(args: &CostArgs) -> anyhow::Result<()> {
    if let Some(name) = &args.drive {
        let setting = Setting::named(name)?;
        return driver::run(&args.plugin, (!args.newest).then(|| setting.version()), setting);
    }
    let committed: Committed = match fs::read_to_string(&args.committed) {
        Ok(text) => serde_json::from_str(&text).with_context(|| args.committed.display().to_string())?,
        Err(_) => Committed::default(),
    };
    let compiler = compiler()?;
    if !committed.compiler.is_empty() && committed.compiler != compiler {
        println!("committed with {}, now {compiler}: differences may be the compiler's\n", committed.compiler);
    }
    let folder = tempfile::Builder::new().prefix("nccl-rdma-cost-").tempdir()?;
    let adapter = args.adapter.canonicalize().with_context(|| args.adapter.display().to_string())?;
    for name in ["libibverbs.so", "libibverbs.so.1"] {
        symlink(&adapter, folder.path().join(name))?;
    }
    let measured =
        SETTINGS.iter().filter(|s| s.name.contains(&args.only)).try_fold(BTreeMap::new(), |mut all, setting| {
            let measure = |plugin, newest| {
                measure(args, plugin, newest, setting, folder.path())
                    .with_context(|| format!("setting {:?}", setting.name))
            };
            let figures = measure(&args.plugin, false)?;
            print(setting, &figures, committed.settings.get(setting.name));
            if let Some(peer) = args.peer.as_ref().filter(|_| setting.is_general()) {
                print_peer(setting, &measure(&args.plugin, true)?, &measure(peer, true)?);
            }
            all.insert(setting.name.to_owned(), figures);
            anyhow::Ok(all)
        });
    folder.close()?;
    let settings = measured?;
    if args.save {
        let text = serde_json::to_string_pretty(&Committed { compiler, settings })? + "\n";
        fs::write(&args.committed, text).with_context(|| args.committed.display().to_string())?;
        println!("saved in {}", args.committed.display());
    }
    Ok(())
}

fn compiler() -> anyhow::Result<String> {
    let output = Command::new("rustc").arg("--version").output().context("rustc")?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.split_whitespace().take(2).collect::<Vec<_>>().join(" "))
}

/// Counts one setting.
fn measure(args: &CostArgs, plugin: &Path, newest: bool, setting: &Setting, folder: &Path) -> anyhow::Result<Figures> {
    let (profile, fabric) = (folder.join("profile"), folder.join("fabric.toml"));
    fs::write(&fabric, driver::FABRIC)?;
    let driver = std::env::current_exe()?;
    let mut command = Command::new("valgrind");
    command
        .args(["--tool=callgrind", "--separate-callers=16", "--dump-line=yes", "--dump-instr=no"])
        .args(["--compress-strings=no", "--compress-pos=no", "--collect-atstart=no"])
        .arg(format!("--toggle-collect={MEASURED}*"))
        .arg(format!("--callgrind-out-file={}", profile.display()))
        .arg(&driver)
        .args(["cost", "--drive", setting.name, "--committed"])
        .arg(&args.committed)
        .arg("--plugin")
        .arg(plugin)
        .arg("--adapter")
        .arg(&args.adapter)
        .args(newest.then_some("--newest"));
    // Settings of the person who measures must not change the figures.
    for (name, _) in std::env::vars_os() {
        if ["NCCL_", "SOFT_HCA_"].iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    let search = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let search = std::env::join_paths(iter::once(folder.to_owned()).chain(std::env::split_paths(&search)))?;
    command
        .env("NCCL_IBVERBS_LIB", &args.adapter)
        // Others find the adapter by its name.
        .env("LD_LIBRARY_PATH", search)
        .env("NCCL_SOCKET_IFNAME", "lo")
        .env("SOFT_HCA_FABRIC", &fabric)
        .env("SOFT_HCA_HOST", "here")
        // Copies by string instruction would be counted byte by byte.
        .env("GLIBC_TUNABLES", "glibc.cpu.x86_rep_movsb_threshold=1073741824")
        .envs(setting.env.iter().copied());
    let output = command.output().context("valgrind cannot be started")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let profile = fs::read_to_string(&profile).context("callgrind's profile")?;
    let objects = Objects { plugin: file_name(plugin), adapter: file_name(&args.adapter), driver: file_name(&driver) };
    count(setting, &profile, &objects)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Names of the files.
struct Objects {
    plugin: String,
    adapter: String,
    driver: String,
}

/// Sums a profile up.
fn count(setting: &Setting, profile: &str, objects: &Objects) -> anyhow::Result<Figures> {
    // Which object a function is in, so that what libc does can be put down to who called it.
    let mut homes = HashMap::new();
    callgrind::read(profile, |line| {
        homes.insert(line.chain.split('\'').next().unwrap_or(""), line.object.rsplit('/').next().unwrap_or(""));
    })?;
    let times: HashMap<_, _> = driver::calls(setting).into_iter().collect();
    let root = std::env::current_dir()?;
    let mut sources = Sources::default();
    let mut figures = Figures::default();
    callgrind::read(profile, |line| {
        let Some(call) = line.chain.split('\'').find_map(|name| name.strip_prefix(MEASURED)) else { return };
        let Some(&times) = times.get(call) else { return };
        let object = line.object.rsplit('/').next().unwrap_or("");
        let ours = |object: &str| object == objects.plugin || object == objects.adapter;
        // NCCL's side of a callback is not the plugin's.
        let owner = (object != objects.driver)
            .then(|| line.chain.split('\'').find_map(|name| homes.get(name).copied().filter(|object| ours(object))))
            .flatten();
        let instructions = line.instructions as f64;
        let add = |split: &mut Split, per: usize| {
            let share = instructions / per as f64;
            match owner {
                Some(owner) if owner == objects.plugin => split.plugin += share,
                Some(_) if object == objects.adapter => split.adapter += share,
                Some(_) => split.copy += share,
                None => split.driver += share,
            }
        };
        add(figures.calls.entry(call.to_owned()).or_default(), times);
        if driver::in_vain(call) {
            return;
        }
        add(&mut figures.message, MESSAGES);
        if owner == Some(&*objects.plugin) {
            let function = sources.function(&root, line);
            *figures.functions.entry(function).or_default() += instructions / MESSAGES as f64;
        }
    })?;
    ensure!(
        driver::calls(setting).iter().all(|(call, _)| figures.calls.get(*call).is_some_and(|split| split.plugin > 0.0)),
        "the profile lacks calls of the plugin: were the binaries built with symbols?"
    );
    let tenth = |x: &mut f64| *x = (*x * 10.0).round() / 10.0;
    for split in figures.calls.values_mut().chain([&mut figures.message]) {
        for x in [&mut split.plugin, &mut split.adapter, &mut split.copy, &mut split.driver] {
            tenth(x);
        }
    }
    figures.functions.values_mut().for_each(tenth);
    figures.functions.retain(|_, count| *count > 0.0);
    Ok(figures)
}

/// Source files, to find the function that a line belongs to: after link-time optimisation most have no symbol left.
#[derive(Default)]
struct Sources(HashMap<String, Option<Vec<String>>>);

impl Sources {
    fn function(&mut self, root: &Path, line: &callgrind::Line<'_>) -> String {
        let Ok(path) = Path::new(line.file).strip_prefix(root) else { return "std, core and libc".to_owned() };
        let lines = self.0.entry(line.file.to_owned()).or_insert_with(|| {
            fs::read_to_string(line.file).ok().map(|text| text.lines().map(str::to_owned).collect())
        });
        let place = path.strip_prefix("src").unwrap_or(path).display();
        let upto = usize::try_from(line.line).unwrap_or(0);
        let name = lines.as_ref().and_then(|lines| lines.iter().take(upto).rev().find_map(|text| defines(text)));
        format!("{place}: {}", name.unwrap_or("?"))
    }
}

/// The name of the function whose definition begins on this line of Rust.
fn defines(text: &str) -> Option<&str> {
    let (before, name) = text.split_once("fn ")?;
    let modifier =
        |word: &str| word.starts_with("pub") || matches!(word, "unsafe" | "const" | "extern" | "\"C\"" | "super)");
    before.split_whitespace().all(modifier).then(|| name.split(['(', '<']).next().unwrap_or(name))
}

const CALLS: Table = Table(&[
    ("instructions per call", -30),
    ("plugin", 9),
    ("committed", 10),
    ("change", 8),
    ("adapter", 9),
    ("committed", 10),
    ("copying", 9),
    ("driver", 8),
]);
const FUNCTIONS: Table =
    Table(&[("the plugin's part of a message", -46), ("now", 9), ("committed", 10), ("change", 8)]);

fn print(setting: &Setting, figures: &Figures, committed: Option<&Figures>) {
    println!("== {} ({} receives of {} in flight)", setting.name, setting.depth, setting.group);
    println!("{}", CALLS.head());
    let row = |name: &str, now: &Split, then: Option<&Split>| {
        println!(
            "{}",
            CALLS.row([
                name.to_owned(),
                shown(now.plugin),
                then.map_or_else(String::new, |then| shown(then.plugin)),
                then.map_or_else(String::new, |then| change(now.plugin, then.plugin)),
                shown(now.adapter),
                then.map_or_else(String::new, |then| shown(then.adapter)),
                shown(now.copy),
                shown(now.driver),
            ])
        );
    };
    for (call, _) in driver::calls(setting) {
        row(call, &figures.calls[call], committed.and_then(|c| c.calls.get(call)));
    }
    row("a message, both ends", &figures.message, committed.map(|c| &c.message));
    println!("\n{}", FUNCTIONS.head());
    let then = |name: &str| committed.map(|c| c.functions.get(name).copied().unwrap_or(0.0));
    let gone = committed.iter().flat_map(|c| c.functions.keys()).filter(|name| !figures.functions.contains_key(*name));
    let mut functions: Vec<_> =
        figures.functions.iter().map(|(name, now)| (name, *now)).chain(gone.map(|name| (name, 0.0))).collect();
    functions.sort_by(|a, b| b.1.total_cmp(&a.1));
    for (name, now) in functions {
        let before = then(name);
        let difference = before.map_or_else(String::new, |then| change(now, then));
        println!("{}", FUNCTIONS.row([name.clone(), shown(now), before.map_or_else(String::new, shown), difference]));
    }
    println!();
}

const PEER: Table = Table(&[
    ("the same, newest version", -30),
    ("plugin", 9),
    ("peer", 9),
    ("peer/plugin", 11),
    ("adapter", 9),
    ("peer's", 9),
]);

fn print_peer(setting: &Setting, plugin: &Figures, peer: &Figures) {
    println!("{}", PEER.head());
    let row = |name: &str, plugin: &Split, peer: &Split| {
        let ratio = format!("{:.2}", peer.plugin / plugin.plugin);
        let (plugin, peer) = ([plugin.plugin, plugin.adapter].map(shown), [peer.plugin, peer.adapter].map(shown));
        let ([plugin, adapter], [peer, peer_adapter]) = (plugin, peer);
        println!("{}", PEER.row([name.to_owned(), plugin, peer, ratio, adapter, peer_adapter]));
    };
    for (call, _) in driver::calls(setting) {
        row(call, &plugin.calls[call], &peer.calls[call]);
    }
    row("a message, both ends", &plugin.message, &peer.message);
    println!();
}

fn shown(count: f64) -> String {
    format!("{count:.1}")
}

fn change(now: f64, then: f64) -> String {
    if (now - then).abs() < 0.05 { "=".to_owned() } else { format!("{:+.1}", now - then) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_definition_is_told_from_a_use() {
        assert_eq!(defines("    pub unsafe fn isend(&mut self) {"), Some("isend"));
        assert_eq!(defines("unsafe extern \"C\" fn test(r: *mut c_void)"), Some("test"));
        assert_eq!(defines("    pub(super) fn call<T>(x: T)"), Some("call"));
        assert_eq!(defines("fn main() {"), Some("main"));
        assert_eq!(defines("    // the fn is called"), None);
        assert_eq!(defines("    let f = make(fn_pointer);"), None);
    }

    #[test]
    fn instructions_go_to_whoever_caused_them() {
        let mut profile = String::new();
        for (call, times) in driver::calls(&SETTINGS[0]) {
            let chain = format!("{MEASURED}{call}'main");
            for (object, function, each) in [
                ("/x/plugin.so", format!("entry'{chain}"), 10),
                ("/x/adapter.so", format!("post'entry'{chain}"), 5),
                ("/lib/libc.so.6", format!("memcpy'post'entry'{chain}"), 3),
                ("/lib/libc.so.6", format!("memset'entry'{chain}"), 2),
                ("/x/driver", format!("callback'entry'{chain}"), 4),
                ("/x/driver", chain.clone(), 3),
            ] {
                profile += &format!("ob={object}\nfl=???\nfn={function}\n0 {}\n", each * times);
            }
        }
        let [plugin, adapter, driver] = ["plugin.so", "adapter.so", "driver"].map(str::to_owned);
        let objects = Objects { plugin, adapter, driver };
        let figures = count(&SETTINGS[0], &profile, &objects).unwrap();
        let each = Split { plugin: 12.0, adapter: 5.0, copy: 3.0, driver: 7.0 };
        assert_eq!(figures.calls["isend"], each);
        // irecv, isend and a test at either end.
        assert_eq!((figures.message.plugin, figures.message.adapter), (48.0, 20.0));
        assert_eq!(figures.functions["std, core and libc"], 48.0);
        let without = profile.replace("plugin.so", "other.so");
        assert!(count(&SETTINGS[0], &without, &objects).is_err(), "a plugin that is not seen is no plugin of cost 0");
    }

    #[test]
    fn a_change_shows_its_sign() {
        assert_eq!((change(3.0, 3.0), change(2.0, 3.5), change(4.0, 3.0)), ("=".into(), "-1.5".into(), "+1.0".into()));
    }
}
