//! How the text of a setting becomes a value, and a value text again.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;

use super::{AddrFamily, GpuPath, PeerMemory, RoceVersion, Spec};

/// What there is to say of a value that was read.
pub(super) enum Note {
    /// It is the one that was asked for, but has a catch.
    Advice(&'static str),
    /// It is the nearest valid one.
    OutOfRange,
}

/// A value of a setting.
pub(super) trait Value: Sized {
    /// The value of a text, or why it has none.
    fn parse(text: &str, spec: &Spec) -> Result<(Self, Option<Note>), String>;
    /// As it would be written in the environment; empty for unset.
    fn show(&self) -> String;
    /// The valid values, in words.
    fn valid(spec: &Spec) -> String;
}

/// strtoll with base 0, the whole text.
fn integer(text: &str) -> Result<i64, String> {
    let text = text.trim();
    let (negative, digits) = match text.as_bytes() {
        [b'-', ..] => (true, &text[1..]),
        [b'+', ..] => (false, &text[1..]),
        _ => (false, text),
    };
    let (radix, digits) = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, &digits[2..]),
        [b'0', _, ..] => (8, &digits[1..]),
        _ => (10, digits),
    };
    if digits.is_empty() || !digits.chars().all(|c| c.is_digit(radix)) {
        return Err("not a whole number".to_owned());
    }
    let value = i64::from_str_radix(digits, radix).map_err(|_| "the number is too large".to_owned())?;
    Ok(if negative { -value } else { value })
}

/// An integer inside the setting's range.
fn ranged(text: &str, spec: &Spec) -> Result<(i64, Option<Note>), String> {
    let value = integer(text)?;
    let (low, high) = match *spec {
        Spec::RangeOrForever(..) if value == 0 => {
            return Ok((0, Some(Note::Advice("the NIC waits for ever, and never notices a dead peer"))));
        }
        Spec::Range(low, high) | Spec::RangeOrForever(low, high) => (low, high),
        Spec::Any => (i64::MIN, i64::MAX),
    };
    let nearest = value.clamp(low, high);
    Ok((nearest, (nearest != value).then_some(Note::OutOfRange)))
}

fn range(spec: &Spec) -> String {
    match spec {
        Spec::Range(low, high) => format!("{low} to {high}"),
        Spec::RangeOrForever(low, high) => format!("{low} to {high}, or 0: for ever"),
        Spec::Any => "whole numbers".to_owned(),
    }
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Value for $type {
            fn parse(text: &str, spec: &Spec) -> Result<(Self, Option<Note>), String> {
                let (value, told) = ranged(text, spec)?;
                let value = Self::try_from(value).map_err(|_| "out of range".to_owned())?;
                Ok((value, told))
            }

            fn show(&self) -> String {
                self.to_string()
            }

            fn valid(spec: &Spec) -> String {
                range(spec)
            }
        }
    )*};
}
integers!(u8, u16, u32, u64, usize);

impl Value for bool {
    fn parse(text: &str, _: &Spec) -> Result<(Self, Option<Note>), String> {
        Ok((integer(text)? != 0, None))
    }

    fn show(&self) -> String {
        u8::from(*self).to_string()
    }

    fn valid(_: &Spec) -> String {
        "0 or 1".to_owned()
    }
}

macro_rules! optional_integers {
    ($($type:ty),*) => {$(
        /// -1 is "not set".
        impl Value for Option<$type> {
            fn parse(text: &str, spec: &Spec) -> Result<(Self, Option<Note>), String> {
                let (value, told) = ranged(text, spec)?;
                Ok((<$type>::try_from(value).ok(), told))
            }

            fn show(&self) -> String {
                self.map_or_else(|| "-1".to_owned(), |v| v.to_string())
            }

            fn valid(spec: &Spec) -> String {
                range(spec)
            }
        }
    )*};
}
optional_integers!(u8, u32);

impl Value for Option<String> {
    fn parse(text: &str, _: &Spec) -> Result<(Self, Option<Note>), String> {
        Ok((Some(text.to_owned()), None))
    }

    fn show(&self) -> String {
        self.clone().unwrap_or_default()
    }

    fn valid(_: &Spec) -> String {
        "text".to_owned()
    }
}

impl Value for PathBuf {
    fn parse(text: &str, _: &Spec) -> Result<(Self, Option<Note>), String> {
        Ok((Self::from(text), None))
    }

    fn show(&self) -> String {
        self.display().to_string()
    }

    fn valid(_: &Spec) -> String {
        "a path".to_owned()
    }
}

impl Value for Option<PathBuf> {
    fn parse(text: &str, _: &Spec) -> Result<(Self, Option<Note>), String> {
        Ok((Some(PathBuf::from(text)), None))
    }

    fn show(&self) -> String {
        self.as_ref().map_or_else(String::new, |p| p.display().to_string())
    }

    fn valid(spec: &Spec) -> String {
        PathBuf::valid(spec)
    }
}

impl fmt::Display for AddrFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "AF_INET",
            Self::V6 => "AF_INET6",
        })
    }
}

impl Value for AddrFamily {
    fn parse(text: &str, _: &Spec) -> Result<(Self, Option<Note>), String> {
        match text {
            "AF_INET" => Ok((Self::V4, None)),
            "AF_INET6" => Ok((Self::V6, None)),
            _ => Err("not a word that is known".to_owned()),
        }
    }

    fn show(&self) -> String {
        self.to_string()
    }

    fn valid(_: &Spec) -> String {
        "AF_INET or AF_INET6".to_owned()
    }
}

impl Value for Option<AddrFamily> {
    fn parse(text: &str, spec: &Spec) -> Result<(Self, Option<Note>), String> {
        AddrFamily::parse(text, spec).map(|(v, told)| (Some(v), told))
    }

    fn show(&self) -> String {
        self.as_ref().map_or_else(String::new, Value::show)
    }

    fn valid(spec: &Spec) -> String {
        AddrFamily::valid(spec)
    }
}

impl Value for RoceVersion {
    fn parse(text: &str, _: &Spec) -> Result<(Self, Option<Note>), String> {
        match integer(text)? {
            1 => Ok((Self::V1, None)),
            2 => Ok((Self::V2, None)),
            _ => Err("no such version".to_owned()),
        }
    }

    fn show(&self) -> String {
        match self {
            Self::V1 => "1",
            Self::V2 => "2",
        }
        .to_owned()
    }

    fn valid(_: &Spec) -> String {
        "1 or 2".to_owned()
    }
}

impl Value for PeerMemory {
    fn parse(text: &str, _: &Spec) -> Result<(Self, Option<Note>), String> {
        match text.trim() {
            "auto" => Ok((Self::Auto, None)),
            "on" => Ok((Self::On, None)),
            "off" => Ok((Self::Off, None)),
            _ => Err("not a word that is known".to_owned()),
        }
    }

    fn show(&self) -> String {
        match self {
            Self::Auto => "auto",
            Self::On => "on",
            Self::Off => "off",
        }
        .to_owned()
    }

    fn valid(_: &Spec) -> String {
        "auto, on or off".to_owned()
    }
}

impl Value for GpuPath {
    fn parse(text: &str, _: &Spec) -> Result<(Self, Option<Note>), String> {
        match text.trim() {
            "auto" => Ok((Self::Auto, None)),
            "gdr" => Ok((Self::Gdr, None)),
            "staging" => Ok((Self::Staging, None)),
            "host" => Ok((Self::Host, None)),
            _ => Err("not a word that is known".to_owned()),
        }
    }

    fn show(&self) -> String {
        match self {
            Self::Auto => "auto",
            Self::Gdr => "gdr",
            Self::Staging => "staging",
            Self::Host => "host",
        }
        .to_owned()
    }

    fn valid(_: &Spec) -> String {
        "auto, gdr, staging or host".to_owned()
    }
}

impl Value for Option<IpNet> {
    fn parse(text: &str, _: &Spec) -> Result<(Self, Option<Note>), String> {
        let net = text.trim().parse().map_err(|_| "not a range of addresses".to_owned())?;
        Ok((Some(net), None))
    }

    fn show(&self) -> String {
        self.map_or_else(String::new, |n| n.to_string())
    }

    fn valid(_: &Spec) -> String {
        "a range in CIDR form, as 10.0.0.0/8 or fd00::/8".to_owned()
    }
}

impl Value for Option<RangeInclusive<u16>> {
    fn parse(text: &str, _: &Spec) -> Result<(Self, Option<Note>), String> {
        let wrong = || "not a range of ports".to_owned();
        let (first, last) = text.trim().split_once('-').ok_or_else(wrong)?;
        let first: u16 = first.trim().parse().map_err(|_| wrong())?;
        let last: u16 = last.trim().parse().map_err(|_| wrong())?;
        if first == 0 || first > last {
            return Err(wrong());
        }
        Ok((Some(first..=last), None))
    }

    fn show(&self) -> String {
        self.as_ref().map_or_else(String::new, |r| format!("{}-{}", r.start(), r.end()))
    }

    fn valid(_: &Spec) -> String {
        "first-last, as 50000-50010".to_owned()
    }
}

impl Value for Duration {
    fn parse(text: &str, spec: &Spec) -> Result<(Self, Option<Note>), String> {
        let (value, told) = ranged(text, spec)?;
        Ok((Self::from_secs(u64::try_from(value).unwrap_or(0)), told))
    }

    fn show(&self) -> String {
        self.as_secs().to_string()
    }

    fn valid(spec: &Spec) -> String {
        range(spec)
    }
}
